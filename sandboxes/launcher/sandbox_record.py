"""Record of one sandbox and its command executions, which only the launcher changes.

Invariants:
- An `exec_id` is never forgotten while its sandbox is alive, so that nothing runs twice; its result may be dropped.
- Results are stored in memory files that the first caller has filled; the launcher copies no output.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Final, NamedTuple

from headrace.sandboxes.launcher.connections import Waiter
from headrace.sandboxes.launcher.wire import Channel, Message

_MAX_RESULTS: Final = 32
"""Maximum number of stored results per sandbox; beyond it, the oldest is dropped."""


class Settings(NamedTuple):
    """Settings of the launcher, sent by its owner as one line of JSON on standard input."""

    owner_pid: int
    """0 means that there is no owner."""
    tied: bool
    """True if the launcher ends when its standard input ends."""
    idle_exit_s: float
    socket_path: str
    ids_folder: str
    """Folder in which all launchers of the host claim their user ids."""
    max_sandboxes: int
    """Maximum number of sandboxes, including frozen ones."""
    max_live: int | None
    """None means 64, or fewer on a small host."""
    layer_bytes: int
    layers_in: str
    """Folder on the host's disk for file layers; if empty, they are stored in memory."""
    min_free_bytes: int
    memory_bytes: int | None
    cpus: float | None
    pids: int | None
    open_files: int | None
    """None means a share of the host's total (host_limits)."""
    boot_timeout_s: float
    label: str


class RequestRefused(Exception):
    """Refusal of a request; the client receives the error `name` from headrace.sandboxes.errors."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Execution:
    """Command with an `exec_id`. `answer` is None while it is running; `output` is a descriptor or -1; `run`
    authenticates the first caller."""

    __slots__ = ("answer", "exec_id", "output", "run", "runner", "waiters")

    def __init__(self, exec_id: str, run: str, runner: Waiter) -> None:
        self.exec_id = exec_id
        self.run = run
        self.runner = runner
        self.answer: Message | None = None
        self.output = -1
        self.waiters: list[Waiter] = []

    def settle(self, answer: Message, output: int) -> list[Waiter]:
        """Store the result and return the clients that were waiting for it."""
        self.answer, self.output = answer, output
        waiters, self.waiters = self.waiters, []
        return waiters

    def forget(self) -> None:
        """Close the output; the id stays in use."""
        self.answer = self.lost()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def lost(self) -> Message:
        """Return the answer to a request whose result has been lost."""
        text = f"exec_id {self.exec_id!r} has run, but its result is lost: check its effects, or use a new id"
        return {"error": "ExecResultLost", "message": text}


class Executions:
    """Executions in one sandbox, in the order in which they began."""

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, Execution] = OrderedDict()
        self._retained: list[Execution] = []

    def find(self, exec_id: str) -> Execution | None:
        return self._by_id.get(exec_id)

    def begin(self, exec_id: str, run: str, runner: Waiter) -> None:
        execution = self._by_id[exec_id] = Execution(exec_id, run, runner)
        self._retained.append(execution)
        settled = [execution for execution in self._retained if execution.answer is not None]
        for oldest in settled[: max(0, len(self._retained) - _MAX_RESULTS)]:
            oldest.forget()
            self._retained.remove(oldest)

    def of(self, client: Channel) -> list[Execution]:
        """Return the unfinished executions that this client started."""
        unfinished = (execution for execution in self._retained if execution.answer is None)
        return [execution for execution in unfinished if execution.runner.client is client]

    def end(self) -> list[Waiter]:
        """Drop all results of a dead sandbox and return the clients that were waiting for one."""
        waiters = [one for execution in self._retained for one in execution.settle(execution.lost(), execution.output)]
        for execution in self._retained:
            execution.forget()
        self._retained.clear()
        return waiters


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
        self.limit_kills = 0
        self.paused_s = 0.0
        """Total length of earlier pauses."""
        self.pid = 0
        self.control: Channel | None = None
        self.failure = ("BootFailed", "the sandbox's first process died during the boot")
        """Name and message of the error for clients waiting for the boot, in case the sandbox ends now."""
        self.image = ""
        self.folders: tuple[str, ...] = ()
        """Names of the host folders that are mounted in the sandbox."""
        self.host_network = False
        """True if the sandbox has the host's network, which only the launcher's owner can request."""
        self.keep_layer = False
        self.becomes_image = False
        self.boot_waiters: list[Waiter] = []
        self.kill_waiters: list[Waiter] = []
        self.freeze_waiters: list[Waiter] = []
        """Clients that need the layer; if the sandbox ends without one, they get an error."""
        self.executions = Executions()
        self.pending: dict[int, Waiter] = {}
        """Clients waiting for a command, by the command's tag."""

    def shown_state(self) -> str:
        """Return the state, or `paused` for a running sandbox that is paused."""
        return "paused" if self.state == "running" and self.paused_at is not None else self.state

    def check_running(self) -> None:
        """Check that the sandbox is running. Raises RequestRefused."""
        if self.state != "running":
            raise RequestRefused("SandboxGone", f"sandbox {self.id} is {self.state}")
