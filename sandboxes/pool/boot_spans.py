"""Spans of the pool, made with the OpenTelemetry API only: without a configured SDK they cost next to nothing.

Invariant: a span's parent is the one that the request's `traceparent` names, or else the caller's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

POOL_QUEUE: Final = "pool.queue"
POOL_BOOT: Final = "pool.boot"
SANDBOX_HOST: Final = "headrace.sandbox.host"
SANDBOX_IMAGE: Final = "headrace.sandbox.image"
SANDBOX_WARM: Final = "headrace.sandbox.warm"
SANDBOX_TRY: Final = "headrace.sandbox.try"
ERROR_TYPE: Final = "error.type"

MIN_QUEUE_S: Final = 0.001
"""Shortest wait for a place that has a span, by the clock of the event loop."""

tracer = trace.get_tracer("headrace.sandboxes.pool")


@contextmanager
def boot_span(context: Context | None, attributes: Mapping[str, AttributeValue]) -> Iterator[None]:
    """Record the block as a boot, and make its span the current one. An error is recorded as its type and text, without
    a traceback."""
    with tracer.start_as_current_span(
        POOL_BOOT, context, attributes=attributes, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield
        except BaseException as error:
            _end_with(span, error)
            raise


@contextmanager
def queue_span(context: Context | None, attributes: Mapping[str, AttributeValue]) -> Iterator[None]:
    """Record the block as a wait in a queue, unless it ends without an error within `MIN_QUEUE_S`."""
    start_ns, start_s = time.time_ns(), asyncio.get_running_loop().time()

    def waited() -> Span:
        return tracer.start_span(POOL_QUEUE, context, attributes=attributes, start_time=start_ns)

    try:
        yield
    except BaseException as error:
        span = waited()
        _end_with(span, error)
        span.end()
        raise
    if asyncio.get_running_loop().time() - start_s >= MIN_QUEUE_S:
        waited().end()


def _end_with(span: Span, error: BaseException) -> None:
    span.set_attribute(ERROR_TYPE, type(error).__name__)
    span.set_status(Status(StatusCode.ERROR, str(error)))
