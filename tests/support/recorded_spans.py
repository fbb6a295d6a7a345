"""Spans kept in memory by the SDK, with the ids of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from headrace.serve.tracing.telemetry import LIMITS, AttemptIds

if TYPE_CHECKING:
    import pytest

RUN_ID = "run-of-the-test"


@dataclass(frozen=True)
class RecordedSpans:
    """The spans that have ended, and a tracer that adds to them."""

    tracer: Tracer
    kept: InMemorySpanExporter

    @property
    def ended(self) -> tuple[ReadableSpan, ...]:
        return self.kept.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans of a name, with or without a subject after it, in the order in which they ended."""
        return [span for span in self.ended if span.name == name or span.name.startswith(f"{name} ")]

    def one(self, name: str) -> ReadableSpan:
        """Return the only span of a name."""
        [span] = self.named(name)
        return span


@contextmanager
def recorded_spans(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, run_id: str = RUN_ID
) -> Iterator[RecordedSpans]:
    """Record the spans of modules that have a `tracer`."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False, id_generator=AttemptIds(run_id), span_limits=LIMITS)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("test")
    for module in modules:
        monkeypatch.setattr(module, "tracer", tracer)
    yield RecordedSpans(tracer, kept)


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    """Return the attributes of a span."""
    return dict(span.attributes or {})


def parent_id(span: ReadableSpan) -> int:
    """Return the id of a span's parent; 0 for a root."""
    return 0 if span.parent is None else span.parent.span_id
