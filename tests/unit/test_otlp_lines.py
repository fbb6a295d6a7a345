"""Lines of OTLP, beside what the exporters of OpenTelemetry send."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from headrace.actors.telemetry.spans.receiver import request_of
from headrace.actors.telemetry.spans.store import SpanFolder, span_of
from headrace.serve.tracing.otlp_lines import line_of, resource_of
from headrace.serve.tracing.telemetry import LIMITS, TelemetryConfig, configure
from headrace.serve.tracing.tracing import context_from

OTHER = SpanContext(7, 9, is_remote=False, trace_flags=TraceFlags(1))
RESOURCE = Resource({"service.name": "headrace", "number": 1})
TEXTS = st.text(st.characters(codec="utf-8"), max_size=9)
VALUES = st.one_of(
    TEXTS,
    st.sampled_from(["x" * 5000, "line\u2028separator"]),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False) | st.just(math.nan),  # the JSON of a NaN has neither its sign nor its payload
    st.binary(max_size=4),
    st.lists(TEXTS, max_size=3),
    st.lists(st.integers(0, 9), max_size=3),
)
ATTRIBUTES = st.dictionaries(TEXTS.filter(bool), VALUES, max_size=4)
STATUSES = st.sampled_from([Status(), Status(StatusCode.OK), Status(StatusCode.ERROR, "why"), Status(StatusCode.ERROR)])


def tracing() -> tuple[TracerProvider, InMemorySpanExporter]:
    kept = InMemorySpanExporter()
    provider = TracerProvider(resource=RESOURCE, span_limits=LIMITS, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    return provider, kept


def sent(span: ReadableSpan) -> ExportTraceServiceRequest:
    """What a collector gets of the stored line of a span."""
    line = line_of(span, orjson.dumps(resource_of(RESOURCE.attributes)))
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    return request_of([span_of(orjson.loads(line))])


def plain(request: ExportTraceServiceRequest) -> ExportTraceServiceRequest:
    """The request without what the specification leaves to an exporter: flags of spans and links, an empty status."""
    for group in request.resource_spans:
        for scope in group.scope_spans:
            for span in scope.spans:
                span.flags = 0
                span.status.SetInParent()
                for link in span.links:
                    link.flags = 0
    return request


@given(
    name=TEXTS,
    attributes=ATTRIBUTES,
    events=st.lists(st.tuples(TEXTS, ATTRIBUTES), max_size=2),
    links=st.lists(ATTRIBUTES, max_size=2),
    status=STATUSES,
    kind=st.sampled_from(SpanKind),
    times=st.tuples(st.integers(1, 2**63 - 1), st.integers(1, 2**63 - 1)),
    below=st.booleans(),
)
def test_a_collector_gets_from_the_line_what_the_sdk_sends(
    name: str, attributes: Any, events: Any, links: Any, status: Status, kind: SpanKind, times: Any, below: bool
) -> None:
    provider, kept = tracing()
    context = context_from(f"00-{7:032x}-{9:016x}-01") if below else None
    span = provider.get_tracer("test").start_span(
        name, context, kind, attributes, [Link(OTHER, each) for each in links], start_time=times[0]
    )
    for event, given_with in events:
        span.add_event(event, given_with, 5)
    span.set_status(status)
    span.end(times[1])
    [ended] = kept.get_finished_spans()
    stored, upstream = plain(sent(ended)), plain(encode_spans([ended]))
    # Messages with NaN differ from themselves.
    assert stored.SerializeToString(deterministic=True) == upstream.SerializeToString(deterministic=True)


def test_what_exceeds_a_limit_is_counted_in_the_span() -> None:
    provider, kept = tracing()
    with provider.get_tracer("test").start_as_current_span("full", links=[Link(OTHER)] * 9000) as span:
        for number in range(100):
            span.set_attribute(f"a{number}", number)
            span.add_event(f"e{number}")
    [group] = sent(kept.get_finished_spans()[0]).resource_spans
    [full] = group.scope_spans[0].spans
    assert (len(full.attributes), full.dropped_attributes_count) == (64, 36)
    assert (len(full.events), full.dropped_events_count) == (16, 84)
    assert (len(full.links), full.dropped_links_count) == (8192, 9000 - 8192)


@pytest.mark.parametrize("value", ["half \ud800 of a pair", 2**70, b"bytes", float("nan"), ["\udfff"], 2**64])
def test_no_value_keeps_other_spans_from_the_file_or_the_collector(tmp_path: Path, value: Any) -> None:
    telemetry = configure(TelemetryConfig(), process="worker-0", spans_dir=tmp_path, run_id="run", install=False)
    tracer = telemetry.tracer("test")
    tracer.start_span("odd \ud800", attributes={"value": value}).end()
    tracer.start_span("next", attributes={"text": "ok"}).end()
    assert telemetry.flush()
    telemetry.shutdown()
    odd, following = SpanFolder(tmp_path).spans()
    assert odd["name"] == "odd ?"
    assert "value" in odd["attributes"]
    assert following["attributes"] == {"text": "ok"}
    assert SpanFolder(tmp_path).lost() == {}
    names = [span.name for group in request_of([odd, following]).resource_spans for span in group.scope_spans[0].spans]
    assert names == ["odd ?"], "both are of one process, in two scopes of its resource"


@pytest.mark.parametrize("error", [ValueError("bad"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_an_error_in_a_block_is_stored_and_a_cancellation_is_not(tmp_path: Path, error: BaseException) -> None:
    telemetry = configure(TelemetryConfig(), process="worker-0", spans_dir=tmp_path, run_id="run", install=False)
    with pytest.raises(type(error)), telemetry.tracer("test").start_as_current_span("block"):
        raise error
    telemetry.shutdown()
    [span] = SpanFolder(tmp_path).spans()
    if isinstance(error, Exception):
        assert (span["status"], span["detail"]) == ("error", "ValueError: bad")
        [event] = span["events"]
        assert event["attributes"]["exception.type"] == "ValueError"
        assert "raise error" in event["attributes"]["exception.stacktrace"]
    else:
        assert (span["status"], span["events"]) == ("unset", [])


def test_a_span_below_one_that_is_not_recorded_is_not_recorded(tmp_path: Path) -> None:
    telemetry = configure(TelemetryConfig(), process="worker-0", spans_dir=tmp_path, run_id="run", install=False)
    with telemetry.tracer("test").start_as_current_span("chat", context_from(f"00-{7:032x}-{9:016x}-00")) as span:
        assert (span.is_recording(), span.get_span_context().trace_id) == (False, 7)
    telemetry.shutdown()
    assert list(SpanFolder(tmp_path).spans()) == []
