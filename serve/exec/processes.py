"""Spawned commands, kept for clients that may lose their connection at any moment.

Invariants:
- Output is numbered piece by piece. A piece is held until its client asks for what comes after it, so a lost answer
  costs nothing; what nobody has taken stays below `WINDOW_BYTES` and one piece, then the command waits at its pipe.
- Standard input is taken once: each piece says how many bytes came before it.
- The same spawn_id of a sandbox starts one process. Ends are kept for the last `KEPT_ENDS` processes of a sandbox.
- Processes end with the server, whose pipes they are; whoever asks for one later gets ExecResultLost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import ExecResultLost, SandboxError, SpecRefused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.sandboxes.base import Output, Process
    from headrace.sandboxes.remote.tasks import ServerTasks

WINDOW_BYTES: Final = 256 << 10
KEPT_ENDS: Final = 64
LONGEST_POLL_S: Final = 20.0


class OutputWindow:
    """One writer, one reader that acknowledges. Numbers begin with 1."""

    def __init__(self) -> None:
        self._pieces: deque[Output] = deque()
        self._taken = 0
        self._held_bytes = 0
        self._closed = False
        self._changed = asyncio.Condition()

    async def append(self, piece: Output) -> None:
        """Waits while `WINDOW_BYTES` are held."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._held_bytes < WINDOW_BYTES)
            self._pieces.append(piece)
            self._held_bytes += len(piece.data)
            self._changed.notify_all()

    async def close(self) -> None:
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def after(self, number: int, wait_s: float) -> tuple[list[Output], bool]:
        """Pieces after this number, at once or when there are some; and whether these are the last. Forgets those up to
        it. Raises SpecRefused for a number that was never given."""
        async with self._changed:
            if not self._taken <= number <= self._taken + len(self._pieces):
                raise SpecRefused(f"after={number}: pieces {self._taken} to {self._taken + len(self._pieces)} are held")
            while self._taken < number:
                self._held_bytes -= len(self._pieces.popleft().data)
                self._taken += 1
            self._changed.notify_all()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait_for(lambda: self._pieces or self._closed)
            except TimeoutError:
                return [], False
            return list(self._pieces), self._closed


class KeptProcess:
    """A process with its window; `start` begins to read it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.window = OutputWindow()
        self._taken_bytes = 0
        self._writing = asyncio.Lock()
        self._end: asyncio.Future[int] | None = None

    def start(self, tasks: ServerTasks) -> None:
        tasks.start(self._read())
        self._end = tasks.share(self.process.wait())

    @property
    def ended(self) -> bool:
        return self._end is not None and self._end.done()

    async def _read(self) -> None:
        try:
            async for piece in self.process.output():
                await self.window.append(piece)
        finally:
            await self.window.close()

    async def write_stdin(self, offset: int, data: bytes) -> int:
        """The bytes taken by now. Raises SandboxFileError, SpecRefused (a gap)."""
        async with self._writing:
            if offset > self._taken_bytes:
                raise SpecRefused(f"offset={offset}: only {self._taken_bytes} bytes came before")
            rest = data[self._taken_bytes - offset :]
            if rest:
                await self.process.write_stdin(rest)
                self._taken_bytes += len(rest)
            return self._taken_bytes

    async def wait(self, wait_s: float) -> int | None:
        """The exit code; None when it still runs. Raises ExecTimeout, SandboxGone."""
        assert self._end is not None
        await asyncio.wait((self._end,), timeout=wait_s)
        return self._end.result() if self._end.done() else None


class ProcessTable:
    """All processes of a server by sandbox and spawn_id."""

    def __init__(self, tasks: ServerTasks) -> None:
        self._tasks = tasks
        self._sandboxes: dict[str, dict[str, asyncio.Future[KeptProcess]]] = {}

    async def spawn(self, sandbox: str, spawn_id: str, start: Callable[[], Awaitable[Process]]) -> KeptProcess:
        """Start, or give the one of this id. Raises SandboxError."""
        known = self._sandboxes.setdefault(sandbox, {})
        if spawn_id not in known:
            self._forget_old(known)
            known[spawn_id] = self._tasks.share(self._start(start))
        future = known[spawn_id]
        try:
            return await asyncio.shield(future)
        except SandboxError:
            # What never started may be tried again.
            known.pop(spawn_id, None)
            raise

    async def _start(self, start: Callable[[], Awaitable[Process]]) -> KeptProcess:
        kept = KeptProcess(await start())
        kept.start(self._tasks)
        return kept

    def _forget_old(self, known: dict[str, asyncio.Future[KeptProcess]]) -> None:
        ended = [spawn_id for spawn_id, future in known.items() if _has_ended(future)]
        for spawn_id in ended[: max(0, len(ended) - KEPT_ENDS + 1)]:
            del known[spawn_id]

    async def find(self, sandbox: str, spawn_id: str) -> KeptProcess:
        """Raises ExecResultLost."""
        future = self._sandboxes.get(sandbox, {}).get(spawn_id)
        if future is None:
            raise ExecResultLost(f"process {spawn_id} is not known: it ended long ago, or with an earlier server")
        return await asyncio.shield(future)

    def forget(self, sandbox: str) -> None:
        """The sandbox is dead."""
        self._sandboxes.pop(sandbox, None)

    def keep_only(self, alive: set[str]) -> None:
        for sandbox in self._sandboxes.keys() - alive:
            del self._sandboxes[sandbox]


def _has_ended(future: asyncio.Future[KeptProcess]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None or future.result().ended)
