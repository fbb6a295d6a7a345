"""SGLang's own spans, below the span that asks it for a generation."""

from __future__ import annotations

from array import array
from pathlib import Path

import aiohttp
import pytest
from opentelemetry import trace

from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.policies.engine import EngineId, GenerateRequest, RequestId
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.sglang.server import SGLangProcess
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.otlp_server import otlp_server
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
from headrace.serve.tracing.tracing import start_rollout_span
from support import engine_kinds as kinds
from support.gateway_rig import until

REQUEST = {"tokenize", "prefill_forward", "decode_loop"}
"""Parts of a request."""
SKEW_NS = 50_000_000
"""SGLang reads time.time() and then time.perf_counter(), and adds the difference to all of its monotonic times
(req_time_stats.py): a process that loses its core between the two tells times that are too early."""


def named(folder: Path) -> set[str]:
    return {span["name"] for span in SpanFolder(folder).spans() if span["attributes"].get(names.SENDER)}


@pytest.mark.sglang
@pytest.mark.timeout(300)
async def test_the_request_of_sglang_is_a_child_of_the_engine_span(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang 0.5.23 with `--enable-trace`, which sends by OTLP/HTTP in protobuf."""
    telemetry = configure(TelemetryConfig(), process="engines", spans_dir=tmp_path / "spans", run_id="r", install=False)
    intake = telemetry.intake()
    assert intake is not None
    async with otlp_server(intake) as url, aiohttp.ClientSession() as session:
        process = kinds.engine_process("sglang", tiny_model_dir, tmp_path / "engine", traces_url=url)
        assert isinstance(process, SGLangProcess)
        async with process:
            engine = SGLangEngine(EngineId("e"), process.url, session, SGLangConfig(vocab_size=1024))
            root = start_rollout_span(telemetry.tracer("test"), "rollout-1", 1)
            with trace.use_span(root, end_on_exit=True):
                for number in range(3):
                    with telemetry.tracer("test").start_as_current_span(names.ENGINE):
                        asked = GenerateRequest(
                            request_id=RequestId(f"r{number}"), input_ids=array("i", [1, 2, 3]), max_new_tokens=4
                        )
                        assert len((await engine.generate(asked)).output_ids) == 4
            # SGLang's processes send every half second, and are killed with what they have not sent.
            await until(lambda: telemetry.flush() and named(tmp_path / "spans") >= REQUEST)
    telemetry.shutdown()
    spans = list(SpanFolder(tmp_path / "spans").spans())
    ours = {span["span_id"]: span for span in spans if span["name"] == names.ENGINE}
    sent = [span for span in spans if span["attributes"].get(names.SENDER) == "engine"]
    requests = [span for span in sent if span["parent_id"] in ours]
    assert {span["parent_id"] for span in requests} == set(ours)
    for request in requests:
        above = ours[request["parent_id"]]
        assert request["trace_id"] == above["trace_id"]
        assert request["start_ns"] <= request["end_ns"]
        assert above["start_ns"] - SKEW_NS <= request["start_ns"]
        assert request["end_ns"] <= above["end_ns"] + SKEW_NS
    known = {span["span_id"] for span in spans}
    below = [span for span in sent if span["trace_id"] == requests[0]["trace_id"]]
    assert all(span["parent_id"] in known for span in below)
    assert {span["resource"]["openinference.project.name"] for span in below} == {"r"}
