"""State of a live sandbox in the server: row, provider's handle, commands, watchers and recent events."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.errors import BootTimeout, ExecTimeout
from headrace.sandboxes.images.builder import is_check, wait_until_ready
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.e2b_state.bodies import timestamp
from headrace.serve.sandbox_servers.e2b_state.entries import Accounts
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, RpcError
from headrace.serve.sandbox_servers.e2b_state.processes import CommandRequest, ProcessTable, RunningCommand
from headrace.serve.sandbox_servers.e2b_state.table import SandboxRow, State
from headrace.serve.sandbox_servers.e2b_state.watchers import ScanBudget, Watcher

LEVEL: Final = "info"
LOGGER: Final = "process"
"""Name of a logger that `e2b sandbox logs` shows by default."""
_KEPT_EVENTS: Final = 256
MAX_PORT_REQUESTS: Final = 64
_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An entry of the logs route: the start or end of a command, or a change in the sandbox's state."""

    at: float
    message: str

    def to_json(self) -> dict[str, Any]:
        return {"timestamp": timestamp(self.at), "message": self.message, "level": LEVEL, "fields": {"logger": LOGGER}}

    def to_line(self) -> dict[str, Any]:
        """Return an entry for the older route. Its line is JSON, which E2B's command line parses and filters."""
        line = {"level": LEVEL, "logger": LOGGER, "message": self.message}
        return {"timestamp": timestamp(self.at), "line": orjson.dumps(line).decode()}


@dataclass(slots=True, kw_only=True)
class CpuSample:
    at: float
    cpu_s: float


@dataclass(slots=True, eq=False)
class LiveSandbox:
    """A sandbox that exists. State changes hold the lock `changing`, so that a kill and a pause never overlap."""

    row: SandboxRow
    handle: Sandbox
    accounts: Accounts = field(init=False)
    processes: ProcessTable = field(default_factory=ProcessTable)
    watchers: dict[str, tuple[Watcher, asyncio.Task[None]]] = field(default_factory=dict)
    scans: ScanBudget | None = None
    """What its watchers hold."""
    watching: set[asyncio.Task[None]] = field(default_factory=set)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    cpu: CpuSample | None = None
    port_requests: int = 0
    """Running requests to ports inside the sandbox."""
    ending: bool = False
    """True while the sandbox is being killed; clients see it as dead."""

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.handle, self.row.user)

    def continue_as(self, handle: Sandbox) -> None:
        """Replace the provider's sandbox with another one, which clients see as the same sandbox."""
        self.handle = handle
        self.accounts = Accounts(handle, self.row.user)

    @property
    def runs(self) -> bool:
        return self.row.state is State.RUNNING

    @property
    def sleeps(self) -> bool:
        """True if it is paused, and a request resumes it."""
        return self.row.state is State.PAUSED and self.row.auto_resume

    def time_to_keep(self, asked_s: int | None, default_s: float) -> float:
        """Return the seconds for which a request may keep the sandbox. Raises ApiError 400 above the key's ceiling."""
        most_s = self.row.lifetime_s
        if asked_s is None:
            return default_s if most_s is None else min(default_s, most_s)
        if most_s is not None and asked_s > most_s:
            raise ApiError(400, f"{asked_s} s: this key may keep a sandbox for at most {most_s} s; request less")
        return float(asked_s)

    @contextmanager
    def port_request(self) -> Iterator[None]:
        """Count a request to a port while it runs. Raises ApiError 429 when there are too many."""
        if self.port_requests >= MAX_PORT_REQUESTS:
            message = f"{MAX_PORT_REQUESTS} requests to ports of this sandbox are running"
            raise ApiError(429, message, retry_after_s=_RETRY_S)
        self.port_requests += 1
        try:
            yield
        finally:
            self.port_requests -= 1

    async def start(self, tasks: ServerTasks, ready_s: float) -> None:
        """Run the start command of the template, which is listed, followed and ended like a client's, and wait until
        the ready command succeeds, unless that only sleeps. Raises BootTimeout if it does not within `ready_s`,
        SandboxError."""
        row = self.row
        try:
            account = await self.accounts.find("")
        except RpcError as error:
            raise BootTimeout(f"the template's user: {error.message}") from error
        folder, env = row.folder or account.folder, {**row.base_env, **row.env}
        if row.start_command:
            command = CommandRequest(program="/bin/bash", arguments=("-l", "-c", row.start_command), tag="start_cmd")
            words = [command.program, *command.arguments]
            process = await self.handle.spawn(words, user=account.name, env=env, cwd=folder)
            running = RunningCommand(command, process, row.id)
            self.processes.add(running)
            self.note(f"start command started: {row.start_command[:200]}")
            tasks.start(running.follow())
        if is_check(row.ready_command):
            try:
                async with asyncio.timeout(ready_s):
                    await wait_until_ready(
                        self.handle, row.ready_command, ready_s, user=account.name, env=env, cwd=folder
                    )
            except (TimeoutError, ExecTimeout) as error:
                text = f"the template's ready command did not succeed within {ready_s:g} s: {row.ready_command[:200]}"
                raise BootTimeout(text) from error

    def note(self, message: str) -> None:
        self.events.append(Event(at=time.time(), message=message))

    def close(self) -> None:
        """Stop the sandbox's watchers, because it is dead or the server is shutting down. Its commands end by
        themselves."""
        for task in self.watching:
            task.cancel()
        self.watchers.clear()
