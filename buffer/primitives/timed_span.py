"""Clocks of intervals: one for the part that a breakdown counts and the span that a trace shows, and for moments of
other processes.

Invariants:
- The span is as long as the interval, by the monotonic clock: a wall clock that is set back makes no span negative.
- Both begin at the same moment: the wall clock is read beside the monotonic one, once.
- In virtual time intervals are those of the loop, and there is no Unix time: a run repeats.
- Clocks of hosts need not agree: they only decide between moments that are possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, time, time_ns

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer, use_span
from opentelemetry.util.types import AttributeValue


def interval_clock() -> Callable[[], float]:
    """Return the clock for intervals of the running loop, in seconds: the same time as the loop's own, which uvloop
    rounds to milliseconds and reads once for all that is ready."""
    return asyncio.get_running_loop().time if _is_virtual() else monotonic


def unix_s() -> float | None:
    """Return the Unix time; None in virtual time."""
    return None if _is_virtual() else time()


def moment_between(first_s: float, last_s: float, at_s: float | None) -> float:
    """Return the moment, by the interval clock, of something that another process did between these two: the nearest
    one to the Unix time `at_s` that it read there, or the middle if it read none."""
    if at_s is None or _is_virtual():
        return (first_s + last_s) / 2
    # A busy machine may stop the process between two readings; the closest of three pairs counts.
    readings = [(monotonic(), time(), monotonic()) for _ in range(3)]
    before_s, now_s, after_s = min(readings, key=lambda each: each[2] - each[0])
    return min(last_s, max(first_s, at_s - now_s + (before_s + after_s) / 2))


def _is_virtual() -> bool:
    return getattr(asyncio.get_running_loop(), "is_virtual", False)


@dataclass(slots=True)
class TimedSpan:
    """Span of a block, and the block's begin and end by the monotonic clock, in seconds; `end_s` is set when it
    ends."""

    span: Span
    start_s: float
    end_s: float = 0.0


@contextmanager
def timed_span(
    tracer: Tracer,
    name: str,
    clock: Callable[[], float],
    context: Context | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    attributes: Mapping[str, AttributeValue] | None = None,
    records_errors: bool = True,
) -> Iterator[TimedSpan]:
    """Make the block a span, the current one, and measure it by `clock` (monotonic, in seconds). An exception makes the
    span an error, unless `records_errors` is false."""
    began_ns, start_s = time_ns(), clock()
    span = tracer.start_span(name, context, kind, attributes, start_time=began_ns)
    timed = TimedSpan(span, start_s)
    try:
        with use_span(span, record_exception=records_errors, set_status_on_exception=records_errors):
            yield timed
    finally:
        timed.end_s = clock()
        span.end(began_ns + round((timed.end_s - start_s) * 1e9))
