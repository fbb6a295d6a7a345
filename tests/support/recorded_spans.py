"""Spans kept in memory by a recorder of the test's own, with the ids of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from headrace.serve.tracing.recorder import RecordedSpan, SpanRecorder

if TYPE_CHECKING:
    import pytest

RUN_ID = "run-of-the-test"


@dataclass(frozen=True)
class RecordedSpans:
    """The spans that have ended, and a tracer that adds to them."""

    ended: list[RecordedSpan]
    tracer: SpanRecorder

    def named(self, name: str) -> list[RecordedSpan]:
        """Return the spans of a name, in the order in which they ended."""
        return [span for span in self.ended if span.name == name]

    def one(self, name: str) -> RecordedSpan:
        """Return the only span of a name."""
        [span] = self.named(name)
        return span


@contextmanager
def recorded_spans(
    monkeypatch: pytest.MonkeyPatch, *modules: ModuleType, run_id: str = RUN_ID
) -> Iterator[RecordedSpans]:
    """Record the spans of modules that have a `tracer`."""
    ended: list[RecordedSpan] = []
    tracer = SpanRecorder(ended.append, run_id=run_id)
    for module in modules:
        monkeypatch.setattr(module, "tracer", tracer)
    yield RecordedSpans(ended, tracer)


def attributes_of(span: RecordedSpan) -> dict[str, object]:
    """Return the attributes of a span."""
    return dict(span.attributes or {})


def parent_id(span: RecordedSpan) -> int:
    """Return the id of a span's parent; 0 for a root."""
    return 0 if span.parent is None else span.parent.span_id
