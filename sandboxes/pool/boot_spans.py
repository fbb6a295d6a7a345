"""Spans of the pool, made with the OpenTelemetry API only: without a configured SDK they cost next to nothing.

Invariant: a span's parent is the one that the request's `traceparent` names, or else the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.primitives.timed_span import interval_clock, timed_span

POOL_QUEUE: Final = "pool.queue"
POOL_BOOT: Final = "pool.boot"
SANDBOX_HOST: Final = "headrace.sandbox.host"
SANDBOX_IMAGE: Final = "headrace.sandbox.image"
SANDBOX_WARM: Final = "headrace.sandbox.warm"
SANDBOX_TRY: Final = "headrace.sandbox.try"
ERROR_TYPE: Final = "error.type"

QUEUE: Final = "queue"
BOOT: Final = "boot"
"""Parts of a lease, named as those of a breakdown."""

MIN_QUEUE_S: Final = 0.001
"""Shortest wait for a place that has a span."""

tracer = trace.get_tracer("headrace.sandboxes.pool")


@contextmanager
def boot_span(
    context: Context | None, attributes: Mapping[str, AttributeValue], segments: list[Segment] | None = None
) -> Iterator[None]:
    """Record the block as a boot, make its span the current one, and add it to `segments`. An error is recorded as its
    type and text, without a traceback."""
    clock, host = interval_clock(), str(attributes[SANDBOX_HOST])
    detail = host
    timed = None
    try:
        with timed_span(tracer, POOL_BOOT, clock, context, attributes=attributes, records_errors=False) as timed:
            try:
                yield
            except BaseException as error:
                detail = f"{host}: {type(error).__name__}"
                _end_with(timed.span, error)
                raise
    finally:
        if timed is not None and segments is not None:
            segments.append(Segment(BOOT, timed.start_s, timed.end_s, detail=detail))


@contextmanager
def queue_span(
    context: Context | None, attributes: Mapping[str, AttributeValue], segments: list[Segment]
) -> Iterator[None]:
    """Record the block as a wait in a queue, and add it to `segments`. It has a span unless it ends without an error
    within `MIN_QUEUE_S`."""
    clock = interval_clock()
    began_ns, start_s, failed = time.time_ns(), clock(), None
    try:
        yield
    except BaseException as error:
        failed = error
        raise
    finally:
        waited = Segment(QUEUE, start_s, clock(), detail=str(attributes[SANDBOX_HOST]))
        segments.append(waited)
        if failed is not None or waited.seconds >= MIN_QUEUE_S:
            span = tracer.start_span(POOL_QUEUE, context, attributes=attributes, start_time=began_ns)
            if failed is not None:
                _end_with(span, failed)
            span.end(began_ns + round(waited.seconds * 1e9))


def _end_with(span: Span, error: BaseException) -> None:
    span.set_attribute(ERROR_TYPE, type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
