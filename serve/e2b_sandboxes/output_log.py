"""Bounded buffer of a command's output, between its pipe and the clients that follow it.

Invariants:
- At most `limit_bytes` and one piece are buffered. While there are readers, a full log blocks the command; a reader
  gets every piece from its position on, in order.
- Without readers the command is not blocked: the last `limit_bytes` are retained for the next reader, and the dropped
  ones are counted in `dropped_bytes`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from headrace.sandboxes.base import Output


class OutputLog:
    """Output of one command, for any number of readers."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._pieces: deque[Output] = deque()
        self._first = 0
        self._held_bytes = 0
        self._closed = False
        self._readers: set[OutputReader] = set()
        self._changed = asyncio.Condition()
        self.dropped_bytes = 0

    async def append(self, piece: Output) -> None:
        """Append a piece; waits while a reader is `limit_bytes` behind."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._readers or self._held_bytes < self._limit_bytes)
            self._pieces.append(piece)
            self._held_bytes += len(piece.data)
            while not self._readers and self._held_bytes > self._limit_bytes:
                self.dropped_bytes += self._drop_first()
            self._changed.notify_all()

    def _drop_first(self) -> int:
        size = len(self._pieces.popleft().data)
        self._first += 1
        self._held_bytes -= size
        return size

    async def close(self) -> None:
        """End the log. Readers get the remaining pieces and then None."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    def reader(self) -> OutputReader:
        """Return a reader that starts with the oldest buffered piece."""
        return OutputReader(self)

    async def _next(self, reader: OutputReader) -> Output | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or reader.place < self._first + len(self._pieces))
            if reader.place == self._first + len(self._pieces):
                return None
            piece = self._pieces[reader.place - self._first]
            reader.place += 1
            behind = min(other.place for other in self._readers)
            while self._first < behind:
                self._drop_first()
            self._changed.notify_all()
            return piece

    async def _leave(self, reader: OutputReader) -> None:
        self._readers.discard(reader)
        async with self._changed:
            self._changed.notify_all()


class OutputReader:
    """One reader of a log; an async context manager. Pieces that it has not read are retained for the next reader."""

    def __init__(self, log: OutputLog) -> None:
        self._log = log
        self.place = 0

    async def __aenter__(self) -> Self:
        self.place = self._log._first  # noqa: SLF001 - both classes share this state
        self._log._readers.add(self)  # noqa: SLF001
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self._log._leave(self))  # noqa: SLF001

    async def next(self) -> Output | None:
        """Return the next piece, or None at the end."""
        return await self._log._next(self)  # noqa: SLF001
