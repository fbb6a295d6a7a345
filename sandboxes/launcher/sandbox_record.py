"""Record of one sandbox in the launcher, which alone changes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.sandboxes.launcher.executions import Executions
from headrace.sandboxes.launcher.settings import RequestRefused

if TYPE_CHECKING:
    from headrace.sandboxes.launcher.connections import Waiter
    from headrace.sandboxes.launcher.wire import Channel


class SandboxRecord:
    """State of one sandbox: booting, running, ending or frozen; a removed sandbox has no record."""

    def __init__(self, *, key: str, ttl_s: float, labels: dict[str, str]) -> None:
        self.id = os.urandom(8).hex()
        self.key = key
        self.base_id = 0
        self.ttl_s = ttl_s
        self.labels = labels
        self.state = "booting"
        self.limits: dict[str, float | None] = {}
        self.paused_at: float | None = None
        self.paused_s = 0.0
        """Total length of earlier pauses."""
        self.pid = 0
        self.control: Channel | None = None
        self.failure = ("BootFailed", "the sandbox's first process died during the boot")
        """Name and message of the error for those who wait for the boot, in case the sandbox ends now."""
        self.image = ""
        self.folders: tuple[str, ...] = ()
        """Names of the host folders that the sandbox shows."""
        self.keep_layer = False
        self.becomes_image = False
        self.boot_waiters: list[Waiter] = []
        self.kill_waiters: list[Waiter] = []
        self.freeze_waiters: list[Waiter] = []
        """They want the layer: an end of the sandbox without one is an error for them."""
        self.executions = Executions()
        self.pending: dict[int, Waiter] = {}
        """Clients that wait for a command, by the tag of the command."""

    def shown_state(self) -> str:
        """Return the state, or `paused` for a running sandbox that is paused."""
        return "paused" if self.state == "running" and self.paused_at is not None else self.state

    def check_running(self) -> None:
        """Raises RequestRefused unless the sandbox is running."""
        if self.state != "running":
            raise RequestRefused("SandboxGone", f"sandbox {self.id} is {self.state}")
