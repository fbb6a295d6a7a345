"""Export of spans with the right parents and the derived trace id, to a file of limited size."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from pydantic import ValidationError

from headrace.actors.run.config import load_recipe
from headrace.actors.run.parts import recipe_digest
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.serve.tracing import span_names
from headrace.serve.tracing.telemetry import TelemetryConfig, TelemetryHandle, configure
from headrace.serve.tracing.tracing import context_from, start_rollout_span, trace_id_for, traceparent_of


def read(folder: Path) -> list[dict[str, Any]]:
    return list(SpanFolder(folder).spans())


def setup(folder: Path, **fields: int) -> TelemetryHandle:
    return configure(TelemetryConfig(**fields), process="worker-0", spans_dir=folder, run_id="run", install=False)


def test_a_trace_continues_in_another_process_through_its_traceparent(tmp_path: Path) -> None:
    telemetry = setup(tmp_path)
    tracer = telemetry.tracer("test")
    root = start_rollout_span(tracer, "rollout-7", 2, {span_names.TASK_ID: "t1"})
    remote = tracer.start_span(span_names.TURN, context=context_from(traceparent_of(root)))
    remote.end()
    root.end()
    telemetry.shutdown()
    turn, rollout = read(tmp_path)
    assert (turn["name"], rollout["name"]) == ("chat", "rollout")
    assert turn["trace_id"] == rollout["trace_id"] == f"{trace_id_for('run', 'rollout-7', 2):032x}"
    assert turn["parent_id"] == rollout["span_id"]
    assert rollout["parent_id"] == ""
    assert rollout["resource"]["service.instance.id"] == "worker-0"
    assert rollout["attributes"] == {
        "headrace.rollout.id": "rollout-7",
        "headrace.rollout.attempt": 2,
        "headrace.task.id": "t1",
    }


def test_each_attempt_has_its_own_trace(tmp_path: Path) -> None:
    assert trace_id_for("run", "r", 1) != trace_id_for("run", "r", 2)
    telemetry = setup(tmp_path)
    tracer = telemetry.tracer("test")
    start_rollout_span(tracer, "r", 1).end()
    tracer.start_span("unrelated").end()
    telemetry.shutdown()
    rollout, unrelated = read(tmp_path)
    assert rollout["trace_id"] != unrelated["trace_id"], "the derived id must not leak into later roots"


def test_ids_do_not_follow_the_random_numbers_of_the_process_and_do_not_change_them(tmp_path: Path) -> None:
    """A learner restores the state of `random` from its checkpoint when it repeats steps."""
    telemetry = setup(tmp_path)
    state = random.getstate()
    for _ in range(2):
        random.setstate(state)
        telemetry.tracer("test").start_span("step").end()
        assert random.getstate() == state
    telemetry.shutdown()
    first, repeated = read(tmp_path)
    assert first["trace_id"] != repeated["trace_id"]
    assert first["span_id"] != repeated["span_id"]


def test_the_same_attempt_of_two_runs_has_two_traces() -> None:
    traces = set()
    for run_id in ("first", "second"):
        telemetry = configure(TelemetryConfig(), process="x", spans_dir=None, run_id=run_id, install=False)
        span = start_rollout_span(telemetry.tracer("test"), "rollout-7", 2)
        traces.add(span.get_span_context().trace_id)
        telemetry.shutdown()
    assert traces == {trace_id_for(run_id, "rollout-7", 2) for run_id in ("first", "second")}
    assert len(traces) == 2


def test_the_resource_names_run_host_and_recipe() -> None:
    config = TelemetryConfig(recipe="quickstart")
    telemetry = configure(config, process="x", spans_dir=None, run_id="run-1", install=False)
    assert telemetry.provider is not None
    named = telemetry.provider.resource.attributes
    expected = {"headrace.run.id": "run-1", "host.name": socket.gethostname(), "headrace.recipe": "quickstart"}
    assert {name: named[name] for name in expected} == expected
    telemetry.shutdown()


def test_a_recipe_is_named_after_its_file_which_its_digest_does_not_depend_on(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "scripts" / "recipes" / "simulated.toml"
    config = load_recipe(recipe, (), tmp_path)
    assert config.telemetry.recipe == "simulated"
    assert recipe_digest(config) == recipe_digest(load_recipe(recipe, ["telemetry.recipe=other"], tmp_path))


@pytest.mark.parametrize("text", ["", "x", "00-12-34-01", "00-" + "g" * 32 + "-" + "1" * 16 + "-01", "00-" + "0" * 32])
def test_a_malformed_traceparent_starts_a_new_trace(text: str) -> None:
    assert not trace.get_current_span(context_from(text)).get_span_context().is_valid


def test_without_tracing_nothing_is_recorded_and_no_error_is_raised() -> None:
    telemetry = configure(TelemetryConfig(enabled=False), process="x", spans_dir=None)
    span = start_rollout_span(telemetry.tracer("test"), "r", 1)
    assert traceparent_of(span) == ""
    telemetry.shutdown()


@pytest.mark.parametrize(
    "endpoint",
    [
        "collector:4318",
        "grpc://collector:4317/v1/traces",
        "file:///v1/traces",
        "http://",
        "http:///v1/traces",
        "http://collector:4318",
        "http://collector:0/v1/traces",
        "http://collector:99999/v1/traces",
        "http://[::1/v1/traces",
        "http://collector:4318/v1/ traces",
        "",
    ],
)
def test_an_endpoint_that_is_no_full_http_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError, match=r":4318/v1/traces"):
        TelemetryConfig(otlp_endpoint=endpoint)
