"""Trace context of rollouts as an explicit argument, using only the OpenTelemetry API.

Invariants:
- Without a configured SDK everything here works and costs next to nothing: spans are not recorded, and
  `traceparent_of` returns "".
- The trace id of a rollout attempt and the id of its root span are functions of the ids of the run and the rollout and
  the attempt number, so that its trace can be found, other spans can link to it without having seen it, and traces of
  several runs stay apart in one collector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Protocol

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, Status, StatusCode, TraceFlags, Tracer
from opentelemetry.util.types import AttributeValue

from headrace.buffer.trajectories.types import Cause
from headrace.serve.tracing import span_names

# The API has no argument for the ids of a root span; the generator of ids, which knows the run, reads this.
root_attempt: ContextVar[tuple[str, int] | None] = ContextVar("headrace_root_attempt", default=None)


def trace_id_for(run_id: str, rollout_id: str, attempt: int) -> int:
    """Return the 128-bit trace id of one attempt of a run; never 0."""
    return int.from_bytes(_digest(run_id, rollout_id, attempt)[:16], "big") or 1


def trace_id_text(run_id: str, rollout_id: str, attempt: int) -> str:
    """Return the same id in hexadecimal, as ledgers, logs and span files have it."""
    return f"{trace_id_for(run_id, rollout_id, attempt):032x}"


def root_span_id_for(run_id: str, rollout_id: str, attempt: int) -> int:
    """Return the 64-bit id of the root span of one attempt of a run; never 0."""
    return int.from_bytes(_digest(run_id, rollout_id, attempt)[16:24], "big") or 1


def attempt_context(run_id: str, rollout_id: str, attempt: int) -> SpanContext:
    """Return the context of the root span of one attempt of a run, for links to it."""
    return SpanContext(
        trace_id_for(run_id, rollout_id, attempt),
        root_span_id_for(run_id, rollout_id, attempt),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _digest(run_id: str, rollout_id: str, attempt: int) -> bytes:
    return hashlib.sha256(f"{run_id} {rollout_id} {attempt}".encode()).digest()


def traceparent_of(span: Span) -> str:
    """Return the W3C trace context header of `span`; "" if the span is not recorded
    (https://www.w3.org/TR/trace-context/, section 3.2)."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def context_from(traceparent: str) -> Context:
    """Return the context of the remote span; an empty context if the header is empty or malformed."""
    parts = traceparent.split("-")
    if [len(part) for part in parts] != [2, 32, 16, 2]:
        return Context()
    try:
        trace_id, span_id, flags = (int(part, 16) for part in parts[1:])
    except ValueError:
        return Context()
    remote = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return trace.set_span_in_context(NonRecordingSpan(remote), Context()) if remote.is_valid else Context()


def start_rollout_span(
    tracer: Tracer,
    rollout_id: str,
    attempt: int,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    run_id: str | None = None,
) -> Span:
    """Start the root span of one attempt, with the ids of `attempt_context`. With the run's id, a further attempt links
    to the one before it. The caller ends the span."""
    before = attempt - 1
    links = []
    if run_id is not None and before:
        named: dict[str, str | int] = {span_names.ROLLOUT_ID: rollout_id, span_names.ATTEMPT: before}
        links.append(Link(attempt_context(run_id, rollout_id, before), named))
    token = root_attempt.set((rollout_id, attempt))
    try:
        return tracer.start_span(
            span_names.ROLLOUT,
            context=Context(),
            attributes={span_names.ROLLOUT_ID: rollout_id, span_names.ATTEMPT: attempt, **(attributes or {})},
            links=links,
        )
    finally:
        root_attempt.reset(token)


def current_trace_id() -> str:
    """Return the trace id of the current span in hexadecimal; "" if it is not recorded."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


class Judged(Protocol):
    """An outcome or a verdict. `reward` is None if there is none, because of `cause`."""

    @property
    def cause(self) -> Cause: ...

    @property
    def reward(self) -> float | None: ...

    @property
    def detail(self) -> str: ...


def describe(span: Span, judged: Judged) -> None:
    """Add an outcome or a verdict to its span. One without a reward ends as an error, with its cause and text."""
    span.set_attribute(span_names.CAUSE, judged.cause)
    if judged.reward is not None:
        span.set_attribute(span_names.REWARD, judged.reward)
    else:
        span.set_attribute(span_names.ERROR_TYPE, judged.cause)
        span.set_status(Status(StatusCode.ERROR, judged.detail or str(judged.cause)))
