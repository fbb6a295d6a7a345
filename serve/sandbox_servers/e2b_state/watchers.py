"""Watcher for a folder in a sandbox: a process inside, run as the user, scans the folder periodically.

Invariants:
- The process scans every `_INTERVAL_S` seconds, so that images need no inotify tools; a file that exists only between
  two scans is not reported.
- Up to `_MAX_EVENTS` unread events are stored; a watcher with more than that fails instead of dropping any.
- The process ends with the watcher's task.
- A watcher holds the text of its last scan and nothing else of it. The texts of all watchers of a sandbox, and of the
  server, are bounded (`ScanBudget`): a watcher that would exceed a bound fails.
- The same scans always produce the same events. A file with the same inode under another name has been renamed, which
  produces RENAME for the old name and CREATE for the new one, as with inotify.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from headrace.sandboxes.base import Process, Sandbox, Stream
from headrace.sandboxes.errors import SandboxError
from headrace.serve.sandbox_servers.e2b_state.entries import FORMAT, Account, FileEntry, parse_entries
from headrace.serve.sandbox_servers.e2b_state.errors import Code, RpcError, rpc_error

_INTERVAL_S: Final = 0.2
_MAX_EVENTS: Final = 10_000
_MAX_SCAN_BYTES: Final = 32 << 20
SANDBOX_SCAN_BYTES: Final = 16 << 20
SERVER_SCAN_BYTES: Final = 128 << 20
_SIGKILL: Final = 9
_END_OF_SCAN: Final = b"\0\1\0"
_SCAN: Final = f"""export LC_ALL=C
cd -- "$1" || exit 1
while find . -mindepth 1 -maxdepth "$2" -printf '{FORMAT}' 2>/dev/null; printf '\\0\\1\\0'; do
  [ "$1" -ef . ] || exit 0
  sleep {_INTERVAL_S}
done
"""


class EventType(StrEnum):
    """Kind of an event, a value of filesystem.EventType."""

    CREATE = "EVENT_TYPE_CREATE"
    WRITE = "EVENT_TYPE_WRITE"
    """The content changed."""
    REMOVE = "EVENT_TYPE_REMOVE"
    RENAME = "EVENT_TYPE_RENAME"
    """The file was renamed from this name."""
    CHMOD = "EVENT_TYPE_CHMOD"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEvent:
    """One event. `name` is relative to the watched folder; `entry` is the current file."""

    kind: EventType
    name: str
    entry: FileEntry | None = None


def changes(before: Mapping[str, FileEntry], after: Mapping[str, FileEntry]) -> list[FileEvent]:
    """Return the events between two scans. A scan maps relative names to entries."""
    gone = [name for name in before if name not in after]
    new = [name for name in after if name not in before]
    new_inodes = {after[name].inode for name in new}
    events = [
        FileEvent(kind=EventType.RENAME if before[name].inode in new_inodes else EventType.REMOVE, name=name)
        for name in gone
    ]
    gone_inodes = {before[name].inode for name in gone}
    for name in new:
        entry = after[name]
        events.append(FileEvent(kind=EventType.CREATE, name=name, entry=entry))
        if entry.kind == "f" and entry.size_bytes and entry.inode not in gone_inodes:
            events.append(FileEvent(kind=EventType.WRITE, name=name, entry=entry))
    for name, entry in after.items():
        if (old := before.get(name)) is not None:
            events += _differences(name, old, entry)
    return events


def _differences(name: str, old: FileEntry, new: FileEntry) -> list[FileEvent]:
    if old.inode != new.inode or old.kind != new.kind:
        # Replaced by another file of that name, as editors write.
        written = [FileEvent(kind=EventType.WRITE, name=name, entry=new)] if new.kind == "f" else []
        return [FileEvent(kind=EventType.CREATE, name=name, entry=new), *written]
    events = []
    if new.kind == "f" and (old.size_bytes, old.modified_at) != (new.size_bytes, new.modified_at):
        events.append(FileEvent(kind=EventType.WRITE, name=name, entry=new))
    if (old.mode, old.owner, old.group) != (new.mode, new.owner, new.group):
        events.append(FileEvent(kind=EventType.CHMOD, name=name, entry=new))
    return events


class ScanBudget:
    """Bytes of scans that watchers hold. A sandbox's budget counts towards its server's."""

    def __init__(self, most_bytes: int, server: ScanBudget | None = None) -> None:
        self._most_bytes = most_bytes
        self._server = server
        self.used_bytes = 0

    def change(self, by_bytes: int) -> None:
        """Add to what is held, or take from it. Raises RpcError when that would be too much, and then adds nothing."""
        if by_bytes > 0 and self.used_bytes + by_bytes > self._most_bytes:
            where = "this sandbox" if self._server is not None else "this server"
            text = (
                f"the watchers of {where} would hold more than {self._most_bytes >> 20} MiB of file names: watch less"
            )
            raise RpcError(Code.RESOURCE_EXHAUSTED, text)
        if self._server is not None:
            self._server.change(by_bytes)
        self.used_bytes += by_bytes


async def start_scans(sandbox: Sandbox, account: Account, path: str, *, recursive: bool) -> Process:
    """Start the process that scans a folder. Raises SandboxError."""
    depth = "1000" if recursive else "1"
    return await sandbox.spawn(["/bin/bash", "-c", _SCAN, "bash", path, depth], user=account.name, cwd="/")


class Watcher:
    """Collects the events of one folder until they are read; `run` is its task."""

    def __init__(self, process: Process, path: str, sandbox_id: str, budget: ScanBudget, *, with_entry: bool) -> None:
        self._process = process
        self._path = path.rstrip("/")
        self._sandbox_id = sandbox_id
        self._budget = budget
        self._with_entry = with_entry
        self._events: deque[dict[str, Any]] = deque()
        self.failure: RpcError | None = None
        self._ended = False
        self._changed = asyncio.Event()
        self.ready = asyncio.Event()
        """Set when the first scan is complete or the watcher has ended."""

    async def run(self) -> None:
        """Collect events until this task is cancelled or the process ends."""
        try:
            async for found in self._changes():
                if len(self._events) + len(found) > _MAX_EVENTS:
                    raise RpcError(Code.RESOURCE_EXHAUSTED, f"more than {_MAX_EVENTS} unread events")
                for change in found:
                    event: dict[str, Any] = {"name": change.name, "type": change.kind.value}
                    if self._with_entry and change.entry is not None:
                        event["entry"] = change.entry.to_json()
                    self._events.append(event)
                if found:
                    self._changed.set()
                self.ready.set()
        except RpcError as error:
            self.failure = error
        except SandboxError as error:
            self.failure = rpc_error(error, self._sandbox_id)
        finally:
            self._ended = True
            self._changed.set()
            self.ready.set()
            with suppress(SandboxError):
                await asyncio.shield(self._process.signal(_SIGKILL))

    async def _changes(self) -> AsyncIterator[list[FileEvent]]:
        """Yield nothing for the first scan, and then the differences of each scan from the one before."""
        received = bytearray()
        last: bytes | None = None
        try:
            async for piece in self._process.output():
                if piece.stream is not Stream.STDOUT:
                    continue
                searched = max(0, len(received) - len(_END_OF_SCAN))
                received += piece.data
                if len(received) > _MAX_SCAN_BYTES:
                    raise RpcError(Code.RESOURCE_EXHAUSTED, "too many files to watch: watch a smaller folder")
                while (end := received.find(_END_OF_SCAN, searched)) >= 0:
                    scan, searched = bytes(received[:end]), 0
                    del received[: end + len(_END_OF_SCAN)]
                    if scan != last:
                        self._budget.change(len(scan) - len(last or b""))
                        before, last = last, scan
                        # In a thread, because the number of files is up to an agent, and other clients wait.
                        yield await asyncio.to_thread(self._compare, before, scan)
        finally:
            self._budget.change(-len(last or b""))

    def _compare(self, before: bytes | None, after: bytes) -> list[FileEvent]:
        new = self._entries(after)
        return [] if before is None else changes(self._entries(before), new)

    def _entries(self, scan: bytes) -> dict[str, FileEntry]:
        try:
            found = parse_entries(scan)
        except ValueError as error:
            raise RpcError(
                Code.INTERNAL, "unexpected file metadata from the sandbox: `find` in its image may have been replaced"
            ) from error
        names = {entry.path.removeprefix("./"): entry for entry in found}
        return {name: replace(entry, path=f"{self._path}/{name}") for name, entry in names.items()}

    def take(self) -> list[dict[str, Any]]:
        """Return the events since the last call. Raises RpcError if there are no events and the watcher has failed."""
        events = list(self._events)
        self._events.clear()
        if not events and self.failure is not None:
            raise self.failure
        return events

    async def next(self, timeout_s: float) -> list[dict[str, Any]] | None:
        """Wait for events. Return an empty list after `timeout_s` seconds and None at the end. Raises RpcError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()
        events = self.take()
        if self._ended:
            self._changed.set()
            return events or None
        return events
