"""The W3C trace context (https://www.w3.org/TR/trace-context/) on HTTP, with the OpenTelemetry API only.

Invariant: it travels in the headers of requests to our own servers and engines, never in what they run or say.
"""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()


def trace_headers() -> dict[str, str]:
    """Return the headers that name the current span (`traceparent`); none if no span is recorded."""
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers


def remote_context(traceparent: str) -> Context | None:
    """Return the context of the span that a `traceparent` names, or the caller's if it is malformed; None for ""."""
    return _propagator.extract({"traceparent": traceparent}) if traceparent else None
