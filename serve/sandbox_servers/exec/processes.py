"""Spawned commands of clients that may lose their connection at any time.

Invariants:
- Pieces of output are numbered. A piece is buffered until the client requests the one after it, so a lost response
  loses nothing. At most `WINDOW_BYTES` plus one piece are buffered; after that, the command blocks on its pipe.
- Each byte of standard input is written only once: each piece has an offset, which is the number of bytes before it.
- Requests with the same spawn_id in a sandbox start only one process. The exit codes of a sandbox's last `MAX_ENDED`
  processes are stored.
- Processes end when the server ends, since it holds their pipes; later requests about them raise ExecResultLost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from headrace.sandboxes.base import Output, Process
from headrace.sandboxes.errors import ExecResultLost, SandboxError, SpecRefused
from headrace.sandboxes.remote.tasks import ServerTasks

WINDOW_BYTES: Final = 256 << 10
MAX_ENDED: Final = 64
LONGEST_POLL_S: Final = 20.0


class OutputWindow:
    """Buffer between one writer and one reader, which acknowledges pieces. Numbers begin with 1."""

    def __init__(self) -> None:
        self._pieces: deque[Output] = deque()
        self._taken = 0
        self._held_bytes = 0
        self._closed = False
        self._changed = asyncio.Condition()

    async def append(self, piece: Output) -> None:
        """Append a piece; wait while `WINDOW_BYTES` are buffered."""
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
        """Return the pieces after this number as soon as there are any, and whether they are the last ones. Drops the
        pieces up to this number. Raises SpecRefused for a number that has never been returned."""
        async with self._changed:
            if not self._taken <= number <= self._taken + len(self._pieces):
                last = self._taken + len(self._pieces)
                raise SpecRefused(f"after={number}: must be from {self._taken} to {last}, the buffered pieces")
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


class BufferedProcess:
    """A process with its output window; `start` starts reading its output."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.window = OutputWindow()
        self._taken_bytes = 0
        self._writing = asyncio.Lock()
        self._end: asyncio.Future[int] | None = None

    def start(self, tasks: ServerTasks) -> None:
        async def read() -> None:
            try:
                async for piece in self.process.output():
                    await self.window.append(piece)
            finally:
                await self.window.close()

        tasks.start(read())
        self._end = tasks.share(self.process.wait())

    @property
    def ended(self) -> bool:
        return self._end is not None and self._end.done()

    async def write_stdin(self, offset: int, data: bytes) -> int:
        """Write the new part of a piece and return the number of bytes written so far. Raises SandboxFileError,
        SpecRefused (a gap)."""
        async with self._writing:
            if offset > self._taken_bytes:
                raise SpecRefused(f"offset={offset}: only {self._taken_bytes} bytes came before")
            rest = data[self._taken_bytes - offset :]
            if rest:
                await self.process.write_stdin(rest)
                self._taken_bytes += len(rest)
            return self._taken_bytes

    async def wait(self, wait_s: float) -> int | None:
        """Return the exit code, or None while the process runs. Raises ExecTimeout, SandboxGone."""
        assert self._end is not None
        await asyncio.wait((self._end,), timeout=wait_s)
        return self._end.result() if self._end.done() else None


class SpawnTable:
    """All processes of a server by sandbox and spawn_id."""

    def __init__(self, tasks: ServerTasks) -> None:
        self._tasks = tasks
        self._sandboxes: dict[str, dict[str, asyncio.Future[BufferedProcess]]] = {}

    async def spawn(self, sandbox: str, spawn_id: str, start: Callable[[], Awaitable[Process]]) -> BufferedProcess:
        """Start a process, or return the one with this id. Raises SandboxError."""

        async def begin() -> BufferedProcess:
            buffered = BufferedProcess(await start())
            buffered.start(self._tasks)
            return buffered

        known = self._sandboxes.setdefault(sandbox, {})
        if spawn_id not in known:
            ended = [name for name, future in known.items() if _has_ended(future)]
            for name in ended[: max(0, len(ended) - MAX_ENDED + 1)]:
                del known[name]
            known[spawn_id] = self._tasks.share(begin())
        future = known[spawn_id]
        try:
            return await asyncio.shield(future)
        except SandboxError:
            # A process that has not started may be retried.
            known.pop(spawn_id, None)
            raise

    async def find(self, sandbox: str, spawn_id: str) -> BufferedProcess:
        """Return a process by its id. Raises ExecResultLost."""
        future = self._sandboxes.get(sandbox, {}).get(spawn_id)
        if future is None:
            raise ExecResultLost(f"unknown process {spawn_id}: it ended long ago, or with an earlier server")
        return await asyncio.shield(future)

    def forget(self, sandbox: str) -> None:
        """Drop a dead sandbox's processes."""
        self._sandboxes.pop(sandbox, None)

    def keep_only(self, alive: set[str]) -> None:
        for sandbox in self._sandboxes.keys() - alive:
            del self._sandboxes[sandbox]


def _has_ended(future: asyncio.Future[BufferedProcess]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None or future.result().ended)
