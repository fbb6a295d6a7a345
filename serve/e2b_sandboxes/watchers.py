"""Watching a folder of a sandbox: one process of the user inside that looks at it again and again.

Invariants:
- It looks every `_EVERY_S`, so that no image needs inotify tools; what comes and goes between two looks is not seen.
- Events that nobody fetches are kept up to `_KEPT_EVENTS`; a watcher that overflowed says so instead of losing some.
- The process ends with the watcher's task.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from headrace.sandboxes.base import Stream
from headrace.sandboxes.errors import SandboxError
from headrace.serve.e2b_sandboxes.changes import changes
from headrace.serve.e2b_sandboxes.entries import FORMAT, parse_entries
from headrace.serve.e2b_sandboxes.errors import Code, RpcError, rpc_error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from headrace.sandboxes.base import Process, Sandbox
    from headrace.serve.e2b_sandboxes.accounts import Account
    from headrace.serve.e2b_sandboxes.changes import Change
    from headrace.serve.e2b_sandboxes.entries import Entry

_EVERY_S: Final = 0.2
_KEPT_EVENTS: Final = 10_000
_MAX_LOOK_BYTES: Final = 32 << 20
_SIGKILL: Final = 9
_END_OF_LOOK: Final = b"\0\1\0"
_LOOK: Final = f"""export LC_ALL=C
cd -- "$1" || exit 1
while find . -mindepth 1 -maxdepth "$2" -printf '{FORMAT}' 2>/dev/null; printf '\\0\\1\\0'; do
  [ "$1" -ef . ] || exit 0
  sleep {_EVERY_S}
done
"""


async def look_at(sandbox: Sandbox, account: Account, path: str, *, recursive: bool) -> Process:
    """Start looking. Raises SandboxError."""
    depth = "1000" if recursive else "1"
    return await sandbox.spawn(["/bin/bash", "-c", _LOOK, "bash", path, depth], user=account.name, cwd="/")


class Watcher:
    """Events of one folder that were not fetched yet; `run` is its task."""

    def __init__(self, process: Process, path: str, sandbox_id: str, *, with_entry: bool) -> None:
        self._process = process
        self._path = path.rstrip("/")
        self._sandbox_id = sandbox_id
        self._with_entry = with_entry
        self._events: deque[dict[str, Any]] = deque()
        self._failure: RpcError | None = None
        self._ended = False
        self._changed = asyncio.Event()
        self.ready = asyncio.Event()
        """The first look was taken, or it ended."""

    async def run(self) -> None:
        before: dict[str, Entry] | None = None
        try:
            async for after in self._looks():
                if before is not None:
                    self._keep(changes(before, after))
                before = after
                self.ready.set()
        except RpcError as error:
            self._failure = error
        except SandboxError as error:
            self._failure = rpc_error(error, self._sandbox_id)
        finally:
            self._ended = True
            self._changed.set()
            self.ready.set()
            with suppress(SandboxError):
                await asyncio.shield(self._process.signal(_SIGKILL))

    def _keep(self, found: list[Change]) -> None:
        if len(self._events) + len(found) > _KEPT_EVENTS:
            raise RpcError(Code.RESOURCE_EXHAUSTED, f"more than {_KEPT_EVENTS} unread events")
        for change in found:
            event: dict[str, Any] = {"name": change.name, "type": change.kind.value}
            if self._with_entry and change.entry is not None:
                event["entry"] = change.entry.to_json()
            self._events.append(event)
        if found:
            self._changed.set()

    async def _looks(self) -> AsyncIterator[dict[str, Entry]]:
        """Each that differs from the one before."""
        received = bytearray()
        last: bytes | None = None
        async for piece in self._process.output():
            if piece.stream is not Stream.STDOUT:
                continue
            searched = max(0, len(received) - len(_END_OF_LOOK))
            received += piece.data
            if len(received) > _MAX_LOOK_BYTES:
                raise RpcError(Code.RESOURCE_EXHAUSTED, "too many files to watch")
            while (end := received.find(_END_OF_LOOK, searched)) >= 0:
                look, searched = bytes(received[:end]), 0
                del received[: end + len(_END_OF_LOOK)]
                if look != last:
                    last = look
                    # In a thread: how many files there are is up to an agent, and other clients wait.
                    yield await asyncio.to_thread(self._entries, look)

    def _entries(self, look: bytes) -> dict[str, Entry]:
        try:
            found = parse_entries(look)
        except ValueError as error:
            raise RpcError(Code.INTERNAL, "what the sandbox tells of this folder makes no sense") from error
        names = {entry.path.removeprefix("./"): entry for entry in found}
        return {name: replace(entry, path=f"{self._path}/{name}") for name, entry in names.items()}

    def take(self) -> list[dict[str, Any]]:
        """Events since the last call. Raises RpcError once they are fetched and the watch has failed."""
        events = list(self._events)
        self._events.clear()
        if not events and self._failure is not None:
            raise self._failure
        return events

    async def next(self, patience_s: float) -> list[dict[str, Any]] | None:
        """Wait for events; none after `patience_s`, None at the end. Raises RpcError."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._changed.wait()
        self._changed.clear()
        events = self.take()
        if self._ended:
            self._changed.set()
            return events or None
        return events
