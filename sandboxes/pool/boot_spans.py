"""Spans of the pool, made with the OpenTelemetry API only: without a configured SDK they cost next to nothing.

Invariant: a span's parent is the one that the request's `traceparent` names, or else the caller's.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.context import Context
    from opentelemetry.util.types import AttributeValue

POOL_QUEUE: Final = "pool.queue"
POOL_BOOT: Final = "pool.boot"
SANDBOX_HOST: Final = "headrace.sandbox.host"
SANDBOX_IMAGE: Final = "headrace.sandbox.image"
SANDBOX_WARM: Final = "headrace.sandbox.warm"
SANDBOX_TRY: Final = "headrace.sandbox.try"
ERROR_TYPE: Final = "error.type"

tracer = trace.get_tracer("headrace.sandboxes.pool")
_propagator = TraceContextTextMapPropagator()


def context_of(traceparent: str) -> Context | None:
    """Return the context of the span that a W3C `traceparent` names; None (the caller's context) for ""."""
    return _propagator.extract({"traceparent": traceparent}) if traceparent else None


@contextmanager
def pool_span(
    name: str, context: Context | None, attributes: dict[str, AttributeValue], *, min_s: float = 0.0
) -> Iterator[dict[str, AttributeValue]]:
    """Record the block as a span with these attributes, to which the block may add. If it ends without an error within
    `min_s` seconds of the event loop's clock, no span is made. An error is recorded as its type and text, without a
    traceback."""
    start_ns, start_s = time.time_ns(), asyncio.get_running_loop().time()
    try:
        yield attributes
    except BaseException as error:
        span = tracer.start_span(name, context, attributes=attributes, start_time=start_ns)
        span.set_attribute(ERROR_TYPE, type(error).__name__)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end()
        raise
    if asyncio.get_running_loop().time() - start_s >= min_s:
        tracer.start_span(name, context, attributes=attributes, start_time=start_ns).end()
