"""The clock of one attempt's parts in this process: what runs measures the parts that it knows, whoever called it.

Invariants:
- Without a clock around it, measuring costs next to nothing and is not recorded.
- Intervals are on the clock's own time; those of tasks started inside belong to it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from headrace.buffer.primitives.critical_path import Segment, innermost, seconds_by_part

MAX_INTERVALS: Final = 20_000
"""Intervals kept per attempt; later ones are not attributed."""


@dataclass(slots=True)
class PartClock:
    """Intervals of one attempt's parts. `clock` is in seconds."""

    clock: Callable[[], float]
    intervals: list[Segment] = field(default_factory=list)

    def add(self, part: str, start_s: float, end_s: float) -> None:
        """Add an interval of a part."""
        if end_s > start_s and len(self.intervals) < MAX_INTERVALS:
            self.intervals.append(Segment(part, start_s, end_s))

    def seconds(self, part: str) -> float:
        """Return the seconds of a part so far, without those of parts inside it."""
        if not self.intervals:
            return 0.0
        start_s = min(interval.start_s for interval in self.intervals)
        return seconds_by_part(innermost(self.intervals, start_s, self.clock(), idle="")).get(part, 0.0)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count the block as time of a part."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.add(part, start_s, self.clock())


_current: ContextVar[PartClock | None] = ContextVar("part_clock", default=None)


@contextmanager
def part_clock(clock: Callable[[], float]) -> Iterator[PartClock]:
    """Measure the parts of the block and of all tasks that it starts."""
    measured = PartClock(clock)
    token = _current.set(measured)
    try:
        yield measured
    finally:
        _current.reset(token)


@contextmanager
def in_part(part: str) -> Iterator[None]:
    """Count the block as time of a part, if a clock runs around it."""
    current = _current.get()
    if current is None:
        yield
        return
    with current.within(part):
        yield


def add_part(part: str, start_s: float, end_s: float) -> None:
    """Add an interval that was measured elsewhere, if a clock runs around the caller."""
    if (current := _current.get()) is not None:
        current.add(part, start_s, end_s)
