"""The recorder beside the spans of the SDK, which has the same API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, TraceFlags, Tracer

from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.serve.tracing import recorder
from headrace.serve.tracing.recorder import RecordedSpan, SpanRecorder
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
from headrace.serve.tracing.tracing import context_from

LIMIT = recorder.MAX_TEXT_CHARACTERS
OTHER = SpanContext(7, 9, is_remote=True, trace_flags=TraceFlags(1))
TEXTS = st.one_of(st.text(max_size=9), st.sampled_from(["x" * LIMIT, "y" * (LIMIT + 1)]))
VALUES = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(-9, 9),
    st.floats(allow_nan=False),
    st.lists(TEXTS, max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
)
ATTRIBUTES = st.dictionaries(st.sampled_from("abcde"), VALUES, max_size=3)
STATUSES = st.sampled_from([Status(), Status(StatusCode.OK), Status(StatusCode.ERROR, "why"), Status(StatusCode.ERROR)])
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("set_attribute"), st.sampled_from("abcde"), VALUES),
        st.tuples(st.just("set_attributes"), ATTRIBUTES),
        st.tuples(st.just("add_event"), st.text(max_size=3), ATTRIBUTES, st.integers(1, 9)),
        st.tuples(st.just("add_link"), st.just(OTHER), ATTRIBUTES),
        st.tuples(st.just("update_name"), st.text(min_size=1, max_size=3)),
        st.tuples(st.just("set_status"), STATUSES),
        st.tuples(st.just("end"), st.integers(1, 9)),
    ),
    max_size=9,
)


def recorded(work: Callable[[Tracer], Any]) -> RecordedSpan:
    ended: list[RecordedSpan] = []
    work(SpanRecorder(ended.append, run_id="run"))
    [span] = ended
    return span


def by_sdk(work: Callable[[Tracer], Any]) -> ReadableSpan:
    exporter = InMemorySpanExporter()
    limits = SpanLimits(max_span_attributes=recorder.MAX_ATTRIBUTES, max_attribute_length=LIMIT)
    provider = TracerProvider(span_limits=limits, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    work(provider.get_tracer("test"))
    [span] = exporter.get_finished_spans()
    return span


def content(span: RecordedSpan | ReadableSpan) -> dict[str, object]:
    """What is stored of a span, without its ids and the times that it took."""
    return {
        "name": span.name,
        "attributes": dict(span.attributes or {}),
        "events": [(event.name, dict(event.attributes or {}), event.timestamp) for event in span.events],
        "links": [(link.context, dict(link.attributes or {})) for link in span.links],
        "status": (span.status.status_code, span.status.description),
        "times": (span.start_time, span.end_time),
    }


@given(given_first=ATTRIBUTES, operations=OPERATIONS)
def test_a_span_keeps_what_the_sdk_keeps(given_first: dict[str, Any], operations: list[tuple[Any, ...]]) -> None:
    def work(tracer: Tracer) -> None:
        span = tracer.start_span("first", attributes=given_first, links=[Link(OTHER, {"n": 1})], start_time=1)
        for name, *arguments in operations:
            getattr(span, name)(*arguments)
        span.end(10)

    assert content(recorded(work)) == content(by_sdk(work))


@pytest.mark.parametrize("error", [ValueError("bad"), asyncio.CancelledError(), KeyboardInterrupt()])
@pytest.mark.parametrize("options", [{}, {"record_exception": False, "set_status_on_exception": False}])
def test_an_error_in_a_block_is_recorded_as_by_the_sdk(error: BaseException, options: dict[str, bool]) -> None:
    def work(tracer: Tracer) -> None:
        with pytest.raises(type(error)), tracer.start_as_current_span("block", start_time=1, **options) as span:
            assert trace.get_current_span() is span
            raise error

    def kept(span: RecordedSpan | ReadableSpan) -> object:
        # The stack differs by the frames of the two context managers.
        events = [{**(event.attributes or {}), "exception.stacktrace": ""} for event in span.events]
        return events, (span.status.status_code, span.status.description)

    assert kept(recorded(work)) == kept(by_sdk(work))
    assert not trace.get_current_span().get_span_context().is_valid


def test_an_exception_has_its_full_name_and_its_stack() -> None:
    def work(tracer: Tracer) -> None:
        with tracer.start_as_current_span("block") as span:
            try:
                raise pytest.UsageError("wrong")
            except pytest.UsageError as error:
                span.record_exception(error)

    [event], [same] = recorded(work).events, by_sdk(work).events
    assert event.attributes == dict(same.attributes or {})
    assert event.attributes["exception.type"] == "pytest.UsageError"


def test_spans_below_the_current_one_are_its_children_and_others_begin_traces() -> None:
    ended: list[RecordedSpan] = []
    tracer = SpanRecorder(ended.append, run_id="run")
    with tracer.start_as_current_span("above") as above, tracer.start_as_current_span("below"):
        tracer.start_span("apart", Context()).end()
    apart, below, root = ended
    assert (root.parent, apart.parent) == (None, None)
    assert below.parent == above.get_span_context()
    assert below.context.trace_id == root.context.trace_id != apart.context.trace_id
    assert len({each.context.span_id for each in ended}) == 3


def test_a_span_below_one_that_is_not_recorded_is_not_recorded() -> None:
    def work(tracer: Tracer) -> Span:
        with tracer.start_as_current_span("turn", context_from(f"00-{7:032x}-{9:016x}-00")) as span:
            span.set_attribute("a", 1)
            return span

    ended: list[RecordedSpan] = []
    span = work(SpanRecorder(ended.append, run_id="run"))
    assert (ended, span.is_recording(), span.get_span_context().trace_id) == ([], False, 7)


def test_a_block_may_leave_its_span_open() -> None:
    ended: list[RecordedSpan] = []
    with SpanRecorder(ended.append, run_id="run").start_as_current_span("open", end_on_exit=False) as span:
        pass
    assert not ended
    span.end()
    span.end()
    assert [each.name for each in ended] == ["open"]


def test_what_exceeds_a_limit_is_dropped() -> None:
    def work(tracer: Tracer) -> None:
        with tracer.start_as_current_span("full", links=[Link(OTHER)] * (recorder.MAX_LINKS + 1)) as span:
            for number in range(100):
                span.set_attribute(f"a{number}", number)
                span.add_event(f"e{number}")
            span.set_attribute("a0", "changed")
            span.add_link(OTHER)

    span = recorded(work)
    assert len(span.attributes) == recorder.MAX_ATTRIBUTES
    assert span.attributes["a0"] == "changed"
    assert (len(span.events), len(span.links)) == (recorder.MAX_EVENTS, recorder.MAX_LINKS)


@pytest.mark.parametrize("value", ["half \ud800 of a pair", 2**70, b"bytes", float("nan"), [1, "two"], object()])
def test_no_value_keeps_other_spans_from_the_file(tmp_path: Path, value: Any) -> None:
    telemetry = configure(TelemetryConfig(), process="worker-0", spans_dir=tmp_path, run_id="run", install=False)
    tracer = telemetry.tracer("test")
    tracer.start_span("odd", attributes={"value": value}).end()
    tracer.start_span("next", attributes={"text": "ok"}).end()
    assert telemetry.flush()
    telemetry.shutdown()
    odd, following = SpanFolder(tmp_path).spans()
    assert odd["name"] == "odd"
    assert "value" in odd["attributes"]
    assert following["attributes"] == {"text": "ok"}
    assert SpanFolder(tmp_path).lost() == {}
