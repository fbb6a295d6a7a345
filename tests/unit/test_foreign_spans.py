"""Spans of other programs: what an agent cannot do with them, and what is not taken is counted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import orjson
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.trace import get_current_span

from headrace.actors.telemetry.spans import store
from headrace.actors.telemetry.spans.exporting import join_strays
from headrace.actors.telemetry.spans.receiver import request_of
from headrace.actors.telemetry.spans.store import SpanFolder, span_of
from headrace.serve.tracing import foreign_spans, span_names
from headrace.serve.tracing.foreign_spans import PROTOBUF, AgentTrace, OtlpUnreadable, engine_span
from headrace.serve.tracing.telemetry import TelemetryConfig, TelemetryHandle, configure
from headrace.serve.tracing.tracing import context_from

TRACE, AGENT = "7" * 32, "9" * 16
NOW_NS = time.time_ns()


def agent_trace(header: str = f"00-{TRACE}-{AGENT}-01") -> AgentTrace:
    return AgentTrace(get_current_span(context_from(header)).get_span_context(), time.time() - 60)


def span(number: int = 1, parent: str = "", **fields: Any) -> dict[str, Any]:
    times = {"startTimeUnixNano": str(NOW_NS - 10**9), "endTimeUnixNano": str(NOW_NS)}
    below = {"parentSpanId": parent} if parent else {}
    return {"traceId": "1" * 32, "spanId": f"{number:016x}", "name": f"s{number}", **below, **times, **fields}


def request(*spans: dict[str, Any], service: str = "mine") -> dict[str, Any]:
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": service}}]}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "own"}, "spans": [*spans]}]}]}


def telemetry_in(folder: Path, **fields: Any) -> TelemetryHandle:
    return configure(TelemetryConfig(**fields), process="gateway", spans_dir=folder, run_id="run", install=False)


async def taken(folder: Path, trace: AgentTrace, *spans: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What is stored of spans that an agent sends, and the answer."""
    telemetry = telemetry_in(folder)
    intake = telemetry.intake()
    assert intake is not None
    answer, kind = await intake.take(orjson.dumps(request(*spans)), "application/json", trace.adopted)
    assert kind == "application/json"
    telemetry.shutdown()
    return list(SpanFolder(folder).spans()), orjson.loads(answer)


async def test_the_spans_of_an_agent_form_a_tree_below_its_own_whatever_they_say(tmp_path: Path) -> None:
    other = {"traceId": "2" * 32, "spanId": "3" * 16, "attributes": []}
    found, answer = await taken(
        tmp_path,
        agent_trace(),
        span(1),
        span(2, f"{1:016x}"),
        span(3, AGENT),
        span(4, "f" * 16, links=[other, other]),
        span(5, f"{5:016x}"),
    )
    assert answer == {}
    assert {each["trace_id"] for each in found} == {TRACE}
    root, below, named, stray, own_child = found
    assert root["parent_id"] == named["parent_id"] == own_child["parent_id"] == AGENT
    assert below["parent_id"] == root["span_id"]
    assert stray["parent_id"] not in ("f" * 16, "3" * 16), "nor can it name a span that is not its own"
    assert (stray["links"], stray["otlp"]["scopeSpans"][0]["spans"][0]["droppedLinksCount"]) == ([], 2)
    assert not {each["span_id"] for each in found} & {f"{number:016x}" for number in range(6)}
    assert {each["attributes"][span_names.SENDER] for each in found} == {"agent"}
    assert {(each["resource"]["service.name"], each["resource"]["headrace.run.id"]) for each in found} == {
        ("mine", "run")
    }


async def test_equal_ids_of_two_sessions_are_different_spans(tmp_path: Path) -> None:
    first, _ = await taken(tmp_path / "a", agent_trace(), span(1))
    second, _ = await taken(tmp_path / "b", agent_trace(f"00-{'8' * 32}-{AGENT}-01"), span(1))
    assert first[0]["span_id"] != second[0]["span_id"]


async def test_strays_and_circles_join_the_agent_when_a_whole_trace_is_sent(tmp_path: Path) -> None:
    ids = {number: f"{number:016x}" for number in range(9)}
    found, _ = await taken(
        tmp_path, agent_trace(), span(1, ids[2]), span(2, ids[3]), span(3, ids[1]), span(4, "e" * 16), span(5, ids[4])
    )
    agent = {"name": "invoke_agent claude-code", "span_id": AGENT, "parent_id": "", "attributes": {}}
    spans = [agent, *found]
    join_strays(spans)
    parents = {each["span_id"]: each["parent_id"] for each in spans}
    for each in found:
        way = [each["span_id"]]
        while parents[way[-1]]:
            way.append(parents[way[-1]])
            assert len(way) <= len(spans), "a circle"
        assert way[-1] == AGENT
    sent = {s.span_id.hex(): s.parent_span_id.hex() for s in request_of(found).resource_spans[0].scope_spans[0].spans}
    assert all(parents[own] == parent for own, parent in sent.items())
    assert parents[found[4]["span_id"]] == found[3]["span_id"], "what has a parent keeps it"


async def test_times_sizes_and_numbers_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_spans, "MAX_SPANS", 3)
    many = [{"key": f"k{number}", "value": {"stringValue": "x" * 5000}} for number in range(100)]
    deep: dict[str, Any] = {"stringValue": "core"}
    for _ in range(70):
        deep = {"arrayValue": {"values": [deep]}}
    before = time.time_ns()
    events = [{"timeUnixNano": "1", "name": "e"} for _ in range(40)]
    found, answer = await taken(
        tmp_path,
        agent_trace(),
        span(1, startTimeUnixNano="0", endTimeUnixNano=str(2**63), attributes=many, name="n" * 9999, events=events),
        span(2, attributes=[{"key": "deep", "value": deep}]),
        {"traceId": 5, "spanId": None},
        span(3, kind=77, status={"code": 99, "message": "m" * 9999}),
        span(4),
    )
    first, second, third = found
    assert before - 61 * 10**9 < first["start_ns"] <= first["end_ns"] <= time.time_ns()
    assert len(first["attributes"]) == 64 + 1 and {len(value) for value in first["attributes"].values()} == {2048, 5}
    assert (len(first["name"]), len(first["events"])) == (256, 16)
    assert second["attributes"]["deep"] == [[[[[]]]]]
    assert len(third["detail"]) == 2048
    assert answer["partialSuccess"]["rejectedSpans"] == "2", "the malformed one, and the one beyond the limit"


@pytest.mark.parametrize(
    "fields",
    [
        {"endTimeUnixNano": "soon"},
        {"kind": "server"},
        {"events": 5},
        {"links": 5},
        {"status": None},
        {"attributes": [{"key": 5, "value": {"intValue": "x"}}]},
    ],
)
async def test_a_malformed_span_is_rejected_and_raises_nothing(tmp_path: Path, fields: dict[str, Any]) -> None:
    """An error would count as the gateway's own, and make the agent's rollout void."""
    telemetry = telemetry_in(tmp_path)
    intake = telemetry.intake()
    assert intake is not None
    body = orjson.dumps(request(span(1, **fields), span(2)))
    answer, _ = await intake.take(body, "application/json", agent_trace().adopted)
    telemetry.shutdown()
    assert orjson.loads(answer)["partialSuccess"]["rejectedSpans"] == "1"
    assert [each["name"] for each in SpanFolder(tmp_path).spans()] == ["s2"]


async def test_the_reader_holds_a_bounded_number_of_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_RESOURCES", 4)
    telemetry = telemetry_in(tmp_path)
    intake = telemetry.intake()
    assert intake is not None
    for number in range(20):
        body = orjson.dumps(request(span(number), service=f"service-{number}"))
        await intake.take(body, "application/json", agent_trace().adopted)
    telemetry.shutdown()
    folder = SpanFolder(tmp_path)
    found = [each["resource"]["service.name"] for each in folder.spans()]
    assert found == [f"service-{number}" for number in range(20)]
    assert len(folder._resources) <= 4


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"\\ud800"', b"\x00\xff"])
async def test_a_body_that_is_not_otlp_is_refused(tmp_path: Path, body: bytes) -> None:
    telemetry = telemetry_in(tmp_path)
    intake = telemetry.intake()
    assert intake is not None
    with pytest.raises(OtlpUnreadable):
        await intake.take(body, "application/json", agent_trace().adopted)
    if body == b"\x00\xff":
        with pytest.raises(OtlpUnreadable):
            await intake.take(body, PROTOBUF, agent_trace().adopted)
    telemetry.shutdown()


async def test_protobuf_and_json_are_stored_alike_and_engines_keep_their_ids(tmp_path: Path) -> None:
    bare = {"traceId": "1" * 32, "spanId": "3" * 16}
    document = request(
        span(1, attributes=[{"key": "rid", "value": {"intValue": "7"}}], links=[bare], events=[{"timeUnixNano": "5"}]),
        service="sglang",
    )
    sent = [span_of(document)]
    stored = []
    for folder, body, kind in (
        ("json", orjson.dumps(document), "application/json"),
        ("protobuf", request_of(sent).SerializeToString(), PROTOBUF),
    ):
        telemetry = telemetry_in(tmp_path / folder)
        intake = telemetry.intake()
        assert intake is not None
        answer, _ = await intake.take(body, kind, engine_span)
        telemetry.shutdown()
        [found] = SpanFolder(tmp_path / folder).spans()
        assert len(found["links"]) == len(found["events"]) == 1
        found.pop("otlp")
        stored.append(found)
        if kind == PROTOBUF:
            assert not ExportTraceServiceResponse.FromString(answer).HasField("partial_success")
    assert stored[0] == stored[1]
    assert (stored[0]["trace_id"], stored[0]["span_id"]) == ("1" * 32, f"{1:016x}")
    assert stored[0]["attributes"] == {"rid": 7, span_names.SENDER: "engine"}


async def test_spans_beyond_the_queue_are_rejected_and_counted(tmp_path: Path) -> None:
    telemetry = telemetry_in(tmp_path, max_queue_spans=512)
    intake = telemetry.intake()
    assert intake is not None
    body = orjson.dumps(request(*(span(number) for number in range(600))))
    answer, _ = await intake.take(body, "application/json", agent_trace().adopted)
    telemetry.shutdown()
    assert orjson.loads(answer)["partialSuccess"]["rejectedSpans"] == "88"
    assert SpanFolder(tmp_path).lost() == {"queue_full": 88}
    assert len(list(SpanFolder(tmp_path).spans())) == 512
