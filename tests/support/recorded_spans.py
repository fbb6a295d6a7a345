"""Spans kept in memory by an SDK of the test's own, with the ids of a run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.serve.observing.telemetry import RolloutIdGenerator

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    import pytest
    from opentelemetry.trace import Tracer

RUN_ID = "run-of-the-test"


@dataclass(frozen=True)
class RecordedSpans:
    """The spans that have ended, and a tracer that adds to them."""

    exporter: InMemorySpanExporter
    tracer: Tracer

    def named(self, name: str) -> list[ReadableSpan]:
        """Return the spans of a name, in the order in which they ended."""
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        """Return the only span of a name."""
        [span] = self.named(name)
        return span


@contextmanager
def recorded_spans(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, run_id: str = RUN_ID
) -> Iterator[RecordedSpans]:
    """Record the spans of modules that have a `tracer`."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=RolloutIdGenerator(run_id), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    for module in modules:
        monkeypatch.setattr(module, "tracer", tracer)
    yield RecordedSpans(exporter, tracer)
    provider.shutdown()


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    """Return the attributes of a span."""
    return dict(span.attributes or {})


def parent_id(span: ReadableSpan) -> int:
    """Return the id of a span's parent; 0 for a root."""
    return 0 if span.parent is None else span.parent.span_id
