"""State of a live sandbox in the server: row, provider's handle, commands, watchers and recent events."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.serve.e2b_sandboxes.bodies import timestamp
from headrace.serve.e2b_sandboxes.entries import Accounts
from headrace.serve.e2b_sandboxes.processes import ProcessTable

if TYPE_CHECKING:
    from headrace.sandboxes.base import Sandbox
    from headrace.serve.e2b_sandboxes.table import Row
    from headrace.serve.e2b_sandboxes.watchers import Watcher

LEVEL: Final = "info"
LOGGER: Final = "process"
"""Name of a logger that `e2b sandbox logs` shows by default."""
_KEPT_EVENTS: Final = 256


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

    row: Row
    handle: Sandbox
    accounts: Accounts = field(init=False)
    processes: ProcessTable = field(default_factory=ProcessTable)
    watchers: dict[str, tuple[Watcher, asyncio.Task[None]]] = field(default_factory=dict)
    watching: set[asyncio.Task[None]] = field(default_factory=set)
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    cpu: CpuSample | None = None
    ending: bool = False
    """True while the sandbox is being killed; clients see it as dead."""

    def __post_init__(self) -> None:
        self.accounts = Accounts(self.handle, self.row.user)

    def continue_as(self, handle: Sandbox) -> None:
        """Replace the provider's sandbox with another one, which clients see as the same sandbox."""
        self.handle = handle
        self.accounts = Accounts(handle, self.row.user)

    def note(self, message: str) -> None:
        self.events.append(Event(at=time.time(), message=message))

    def close(self) -> None:
        """Stop the sandbox's watchers, because it is dead or the server is shutting down. Its commands end by
        themselves."""
        for task in self.watching:
            task.cancel()
        self.watchers.clear()
