"""State of one container on its host: folder, secret, lease, and first process.

Invariants: all state is in the container's folder, so any process with root's rights can read it without the provider;
a caller without the secret is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from hmac import compare_digest
from pathlib import Path
from typing import Final, NamedTuple

from headrace.sandboxes.base import SandboxRef
from headrace.sandboxes.errors import SandboxGone, SecretRefused
from headrace.sandboxes.linux.processes import parse_stat
from headrace.sandboxes.oci import cgroups as oci_cgroups
from headrace.sandboxes.oci.keeper import PID_FILE
from headrace.sandboxes.oci.runtime import OciRuntime, RuntimeKind
from headrace.sandboxes.unprotected.sandbox_folder import SandboxFolder

STATE_FILE: Final = "sandbox.json"
PAUSED_MARK: Final = "paused"


class ContainerState(NamedTuple):
    """Constant properties of a container, stored in `STATE_FILE` before its boot."""

    runtime: str
    state_folder: str
    keeper_pid: int
    bash: str
    group: str
    base_id: int
    lowers: list[str]
    environment: dict[str, str]
    open_files: int

    @classmethod
    def load(cls, home: Path) -> ContainerState:
        """Read the state of a container. Raises FileNotFoundError if it is gone."""
        return cls(**json.loads((home / STATE_FILE).read_bytes()))

    @property
    def is_runc(self) -> bool:
        return self.runtime == RuntimeKind.RUNC

    def oci_runtime(self) -> OciRuntime:
        return OciRuntime(RuntimeKind(self.runtime), Path(self.state_folder))


class Container:
    """The container that a ref identifies."""

    def __init__(self, ref: SandboxRef) -> None:
        self._ref = ref
        self.home = Path(ref.endpoint)
        self.folder = SandboxFolder(self.home)

    def load(self) -> ContainerState:
        """Return the state of a container, running or frozen. Raises SandboxGone, SecretRefused."""
        if not compare_digest(self.folder.secret(), self._ref.secret):
            raise SecretRefused(f"wrong secret for sandbox {self._ref.id}")
        try:
            return ContainerState.load(self.home)
        except FileNotFoundError as error:
            raise self.gone() from error

    def running(self) -> ContainerState:
        """Return the state of a running container. Raises SandboxGone, SecretRefused."""
        state = self.load()
        if self.folder.frozen:
            raise SandboxGone(f"sandbox {self._ref.id} can run no more commands: it is frozen")
        if self.first_process(state) is None:
            raise self.gone()
        return state

    def gone(self) -> SandboxGone:
        return SandboxGone(f"sandbox {self._ref.id} is gone: killed, or its lease ended")

    def first_process(self, state: ContainerState) -> int | None:
        """Return the pid of the container's first process as long as the keeper is its parent, otherwise None."""
        try:
            pid = int((self.home / PID_FILE).read_text())
            entry = parse_stat(Path(f"/proc/{pid}/stat").read_text(errors="replace"))
        except (OSError, ValueError):
            return None
        return pid if entry.parent == state.keeper_pid and entry.state not in "ZX" else None

    async def end_first_process(self, state: ContainerState) -> None:
        """Kill the first process, and with it the container, and wait for it to exit."""
        pid = self.first_process(state)
        if pid is None:
            return
        oci_cgroups.thaw(state.group)
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, ended.set)
        try:
            # The pid may belong to another process by now; the descriptor of the right one cannot.
            if self.first_process(state) == pid:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def open_private(path: str, flags: int) -> int:
    """An opener for files that only this user can read."""
    return os.open(path, flags, 0o600)
