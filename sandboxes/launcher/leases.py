"""Pure parts of the launcher's bookkeeping: deadlines and id ranges.

Invariants: no clock, no I/O; a renewed lease leaves its old entry in the heap, which is skipped when it comes up.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Deadlines:
    """The next deadline of each key. Times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._current: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, key: str, deadline: float) -> None:
        self._current[key] = deadline
        heapq.heappush(self._heap, (deadline, key))

    def drop(self, key: str) -> None:
        self._current.pop(key, None)

    def remaining(self, key: str, now: float) -> float:
        """Seconds left, at least 0; 0 for an unknown key."""
        return max(0.0, self._current.get(key, now) - now)

    def next(self) -> float | None:
        self._skip_outdated()
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[str]:
        """Keys whose deadline has come; they are forgotten."""
        due: list[str] = []
        while (deadline := self.next()) is not None and deadline <= now:
            _, key = heapq.heappop(self._heap)
            del self._current[key]
            due.append(key)
        return due

    def _skip_outdated(self) -> None:
        while self._heap and self._current.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)


class OneId:
    """The only id there is without root: everybody has it."""

    def take(self) -> int:
        return 0

    def share(self, base: int) -> int:
        return base

    def release(self, base: int) -> None:
        """Nothing to give back."""


class IdRanges:
    """Hands out ranges of `size` host ids; a range may have several holders. `claim()` gives the first id of a further
    block of `block` ranges, or raises IndexError; a block that was claimed is kept."""

    def __init__(self, size: int, block: int, claim: Callable[[], int]) -> None:
        self._size = size
        self._block = block
        self._claim = claim
        self._free: list[int] = []
        self._holders: dict[int, int] = {}

    def take(self) -> int:
        """The first id of a free range. Raises IndexError when none is left."""
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
