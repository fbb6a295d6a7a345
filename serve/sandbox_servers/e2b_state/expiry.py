"""Expiry of sandboxes, using one clock for all of them.

Invariants: each expired name is reported once, in the order of deadlines; a changed deadline replaces the old one; no
work is done before a deadline. Deadlines are in Unix seconds, because they survive restarts and are shown to clients.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Final

_SLACK: Final = 1024
"""The heap is rebuilt when it has more replaced deadlines than this number plus the number of names."""


class Deadlines:
    """Table of deadlines by name, which uses no I/O and no clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._at: dict[str, float] = {}

    def set(self, name: str, at: float) -> None:
        self._at[name] = at
        heapq.heappush(self._heap, (at, name))
        if len(self._heap) > 2 * len(self._at) + _SLACK:
            # Every change of a deadline leaves the old one in the heap.
            self._heap = [(at, name) for name, at in self._at.items()]
            heapq.heapify(self._heap)

    def drop(self, name: str) -> None:
        self._at.pop(name, None)

    def next(self) -> float | None:
        """Return the earliest deadline."""
        while self._heap and self._at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[str]:
        """Remove and return the names whose deadline has passed."""
        names = []
        while (at := self.next()) is not None and at <= now:
            name = heapq.heappop(self._heap)[1]
            del self._at[name]
            names.append(name)
        return names


class ExpiryClock:
    """Clock that calls `on_due(name)` at each deadline while `run` is running."""

    def __init__(self, on_due: Callable[[str], None]) -> None:
        self._deadlines = Deadlines()
        self._on_due = on_due
        self._changed = asyncio.Event()

    def set(self, name: str, at: float) -> None:
        self._deadlines.set(name, at)
        self._changed.set()

    def drop(self, name: str) -> None:
        self._deadlines.drop(name)

    async def run(self) -> None:
        while True:
            now = time.time()
            for name in self._deadlines.due(now):
                self._on_due(name)
            at = self._deadlines.next()
            self._changed.clear()
            try:
                # At most an hour, after which a wall clock that was set forward is noticed.
                async with asyncio.timeout(3600.0 if at is None else min(3600.0, max(0.0, at - time.time()))):
                    await self._changed.wait()
            except TimeoutError:
                continue
