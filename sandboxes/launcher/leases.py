"""Heap of deadlines.

Invariants: no clock, no I/O. Each key is due once, in the order of deadlines. The old entry of a changed deadline stays
in the heap and is skipped when it comes up.
"""

from __future__ import annotations

import heapq

_SLACK = 1024
"""The heap is rebuilt when it has more old entries than this number plus the number of keys."""


class Deadlines:
    """Deadlines by key, in seconds of one clock."""

    def __init__(self) -> None:
        self._current: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, key: str, deadline: float) -> None:
        self._current[key] = deadline
        heapq.heappush(self._heap, (deadline, key))
        if len(self._heap) > 2 * len(self._current) + _SLACK:
            self._heap = [(deadline, key) for key, deadline in self._current.items()]
            heapq.heapify(self._heap)

    def drop(self, key: str) -> None:
        self._current.pop(key, None)

    def remaining(self, key: str, now: float) -> float:
        """Return the seconds left, which is never negative; 0 for an unknown key."""
        return max(0.0, self._current.get(key, now) - now)

    def next(self) -> float | None:
        while self._heap and self._current.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[str]:
        """Remove and return the keys whose deadline has passed."""
        due: list[str] = []
        while (deadline := self.next()) is not None and deadline <= now:
            _, key = heapq.heappop(self._heap)
            del self._current[key]
            due.append(key)
        return due
