"""The clock of one attempt's parts in this process: what runs measures the parts that it knows, whoever called it.

Invariants:
- Without a clock around it, measuring costs next to nothing and is not recorded.
- Intervals are on the clock's own time; those of tasks started inside belong to it too.
- A block that has a span is clocked once, for both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer
from opentelemetry.util.types import AttributeValue

from headrace.buffer.primitives.critical_path import Segment, innermost
from headrace.buffer.primitives.timed_span import timed_span
from headrace.buffer.trajectories.breakdown import is_of_agent
from headrace.buffer.trajectories.timeline import Timeline

MAX_INTERVALS: Final = 20_000
"""Intervals kept per attempt; later ones are not attributed, and `Timeline.left_out` counts them."""


@dataclass(slots=True)
class PartClock:
    """Intervals of one attempt's parts, and the timeline of those that may run side by side: tools and services.
    `clock` is in seconds."""

    clock: Callable[[], float]
    intervals: list[Segment] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)

    def add(self, segment: Segment) -> None:
        """Add an interval of a part."""
        if is_of_agent(segment.part):
            self.timeline.add(segment)
        if segment.end_s > segment.start_s:
            if len(self.intervals) < MAX_INTERVALS:
                self.intervals.append(segment)
            else:
                self.timeline.left_out += 1

    def path(self, start_s: float, end_s: float, *, idle: str) -> list[Segment]:
        """Return the innermost part at each time; time without any is `idle`."""
        return innermost(self.intervals, start_s, end_s, idle=idle)

    def seconds(self, part: str) -> float:
        """Return the seconds of a part so far, without those of parts inside it."""
        if not self.intervals:
            return 0.0
        path = self.path(min(each.start_s for each in self.intervals), self.clock(), idle="")
        return sum(each.seconds for each in path if each.part == part)


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
def in_part(part: str, detail: str = "") -> Iterator[None]:
    """Count the block as time of a part, if a clock runs around it."""
    current = _current.get()
    if current is None:
        yield
        return
    start_s = current.clock()
    try:
        yield
    finally:
        current.add(Segment(part, start_s, current.clock(), detail=detail))


@contextmanager
def in_span(
    tracer: Tracer,
    name: str,
    part: str,
    context: Context | None = None,
    *,
    turn: int = 0,
    detail: str = "",
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """Count the block as time of a part, and record it as a span of the same begin and end."""
    current, timed = _current.get(), None
    clock = time.monotonic if current is None else current.clock
    try:
        with timed_span(tracer, name, clock, context, attributes=attributes) as timed:
            yield timed.span
    finally:
        if timed is not None:
            add_segment(Segment(part, timed.start_s, timed.end_s, turn, detail))


def add_segment(segment: Segment) -> None:
    """Add an interval that was measured elsewhere, if a clock runs around the caller."""
    if (current := _current.get()) is not None:
        current.add(segment)
