"""What the launcher knows of one sandbox. Only the launcher changes it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from headrace.sandboxes.launcher.executions import Executions

if TYPE_CHECKING:
    from headrace.sandboxes.launcher.connections import Waiter
    from headrace.sandboxes.launcher.wire import Channel


class Record:
    """`state` is booting, running, ending or frozen; a sandbox that is gone has no record."""

    __slots__ = (
        "base_id",
        "becomes_image",
        "control",
        "creators",
        "enders",
        "executions",
        "failure",
        "folders",
        "id",
        "image",
        "keep_layer",
        "keepers",
        "key",
        "labels",
        "limits",
        "paused_at",
        "paused_s",
        "pending",
        "pid",
        "state",
        "ttl_s",
    )

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
        """In earlier pauses."""
        self.pid = 0
        self.control: Channel | None = None
        self.failure = ("BootFailed", "the sandbox's first process died during the boot")
        """Name of the error and message for those who wait for the boot, should it end now."""
        self.image = ""
        self.folders: tuple[str, ...] = ()
        """Names of those of the host that it shows."""
        self.keep_layer = False
        self.becomes_image = False
        self.creators: list[Waiter] = []
        self.enders: list[Waiter] = []
        self.keepers: list[Waiter] = []
        """They want its layer: without one its end is an error for them."""
        self.executions = Executions()
        self.pending: dict[int, Waiter] = {}

    def shown_state(self) -> str:
        return "paused" if self.state == "running" and self.paused_at is not None else self.state
