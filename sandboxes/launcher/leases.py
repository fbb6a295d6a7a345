"""Deadlines and id ranges of the launcher.

Invariants: no clock, no I/O. A renewed lease leaves its old entry in the heap, which is skipped when it comes up.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadlines:
    """Deadline of each key, in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._current: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, key: str, deadline: float) -> None:
        self._current[key] = deadline
        heapq.heappush(self._heap, (deadline, key))

    def drop(self, key: str) -> None:
        self._current.pop(key, None)

    def remaining(self, key: str, now: float) -> float:
        """Return the seconds left, at least 0; 0 for an unknown key."""
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


class OneId:
    """Stand-in for `IdRanges` without root, where all sandboxes share the only id."""

    def take(self) -> int:
        return 0

    def share(self, base: int) -> int:
        return base

    def release(self, base: int) -> None:
        """Do nothing: the id is never used up."""


class IdRanges:
    """Allocator of ranges of `size` host ids; a range may have several holders. `claim()` returns the first id of
    another block of `block` ranges, or raises IndexError. A claimed block is retained."""

    def __init__(self, size: int, block: int, claim: Callable[[], int]) -> None:
        self._size = size
        self._block = block
        self._claim = claim
        self._free: list[int] = []
        self._holders: dict[int, int] = {}

    def take(self) -> int:
        """Return the first id of a free range. Raises IndexError when none is left."""
        if not self._free:
            first = self._claim()
            self._free = [first + self._size * index for index in reversed(range(self._block))]
        base = self._free.pop()
        self._holders[base] = 1
        return base

    def share(self, base: int) -> int:
        self._holders[base] += 1
        return base

    def release(self, base: int) -> None:
        self._holders[base] -= 1
        if self._holders[base] == 0:
            del self._holders[base]
            self._free.append(base)
