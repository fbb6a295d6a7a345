"""Spans of weight pushes: one for each push, and below it one for each phase of each wave.

Invariant: a phase ends when the journal is told of the next one; the clean-up after an interrupted push has no span of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.push.contract import Journal, PushReport
from headrace.policies.push.machine import Step
from headrace.serve.tracing import span_names as names

tracer = trace.get_tracer("headrace.actors.engines.push_spans")


class PushSpan:
    """Span of a push that is running. `step` is the push's journal, and passes each step on to `journal`."""

    def __init__(self, span: Span, journal: Journal) -> None:
        self._span = span
        self._journal = journal
        self._phase: Span | None = None

    async def step(self, push_id: str, step: Step) -> None:
        """Begin the span of a phase, after the end of the one before."""
        self.end_phase()
        await self._journal(push_id, step)
        attributes = {
            names.PHASE: step.phase.value,
            names.WAVE: step.wave,
            names.PUSH_ENGINES: [str(engine_id) for engine_id in step.engines],
        }
        self._phase = tracer.start_span(names.PUSH_PHASE, attributes=attributes)

    def end_phase(self) -> None:
        """End the span of the last phase. Idempotent."""
        phase, self._phase = self._phase, None
        if phase is not None:
            phase.end()

    def ended(self, report: PushReport) -> None:
        """Add what became of each engine, in the order of the engines."""
        self._span.set_attributes(
            {
                names.PUSH_ID: report.push_id,
                names.PUSH_BYTES: report.sent_bytes,
                names.PUSH_ENGINES: [str(part.engine_id) for part in report.engines],
                names.PUSH_OUTCOMES: [part.outcome.value for part in report.engines],
            }
        )
        failures = [part.failure for part in report.engines if part.failure]
        if failures:
            self._span.set_attribute(names.ERROR_TYPE, "quarantined" if report.quarantined else "failed")
            self._span.set_status(Status(StatusCode.ERROR, "; ".join(failures)))


@contextmanager
def push_span(
    version: PolicyVersion, engines: Sequence[EngineId], *, transport: str, journal: Journal
) -> Iterator[PushSpan]:
    """Record the block as a push of `version`, in a trace of its own. An error is recorded, and raised again."""
    attributes = {
        names.PUSH_VERSION: str(version),
        names.PUSH_TRANSPORT: transport,
        names.PUSH_ENGINES: [str(engine_id) for engine_id in engines],
    }
    with tracer.start_as_current_span(names.PUSH, Context(), attributes=attributes) as span:
        pushing = PushSpan(span, journal)
        try:
            yield pushing
        except BaseException as error:
            span.set_attribute(names.ERROR_TYPE, type(error).__name__)
            raise
        finally:
            pushing.end_phase()
