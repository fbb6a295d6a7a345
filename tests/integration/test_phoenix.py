"""Traces in arize-phoenix, a collector of the field, over HTTP and gRPC. Needs `scripts/install phoenix`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.telemetry.slow.reading import read_times
from headrace.actors.telemetry.slow.timelines import read_timelines
from headrace.actors.telemetry.spans.receiver import send_all
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.trajectories.types import Cause, Outcome
from headrace.sandboxes.pool.boot_spans import MIN_QUEUE_S
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
from headrace.serve.tracing.tracing import context_from, describe, start_rollout_span, traceparent_of

PROGRAM = next(
    (Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace").glob("phoenix-*/bin/phoenix"), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PROGRAM is None, reason="arize-phoenix is not installed: scripts/install phoenix"),
]
START_S = 240.0


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def phoenix(folder: Path) -> Iterator[tuple[int, int]]:
    """A server of phoenix on loopback: its ports for HTTP and gRPC."""
    http_port, grpc_port = free_port(), free_port()
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(http_port),
        "PHOENIX_GRPC_PORT": str(grpc_port),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "phoenix.log").open("wb") as log:
        arguments = [str(PROGRAM), "serve"]
        with subprocess.Popen(arguments, env=environment, stdout=log, stderr=log) as process:
            try:
                until(lambda: answer(http_port, "/v1/projects") is not None, START_S)
                yield http_port, grpc_port
            finally:
                process.terminate()


def until(condition: Callable[[], bool], seconds: float) -> None:
    end_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.5)


def answer(port: int, path: str) -> Any:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
            return json.load(response)["data"]
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def recorded(folder: Path, run_id: str, rollouts: int) -> SpanFolder:
    """The spans of a run: each rollout has an agent and three turns; the last rollout fails."""
    telemetry = configure(TelemetryConfig(), process="worker-0-1", spans_dir=folder, run_id=run_id, install=False)
    tracer = telemetry.tracer("test")
    for number in range(rollouts):
        root = start_rollout_span(tracer, f"rollout-{number}", 1)
        invoked = {names.OPERATION: names.AGENT, names.AGENT_NAME: "shell"}
        with tracer.start_as_current_span(names.AGENT, context_from(traceparent_of(root)), attributes=invoked):
            for turn in range(3):
                usage = {names.OPERATION: "chat", names.INPUT_TOKENS: 100 + turn, names.OUTPUT_TOKENS: 7}
                tracer.start_span(names.TURN, attributes=usage).end()
        solved = Outcome(reward=1.0, trainable=True, cause=Cause.SOLVED, solved=True)
        describe(root, Outcome.infra("the host vanished") if number == rollouts - 1 else solved)
        root.end()
    telemetry.shutdown()
    return SpanFolder(folder)


def test_trees_tokens_and_errors_of_two_runs_are_kept_apart(tmp_path: Path) -> None:
    with phoenix(tmp_path) as (http_port, grpc_port):
        first, second = recorded(tmp_path / "a", "run-a", 4), recorded(tmp_path / "b", "run-b", 2)
        assert send_all(f"http://127.0.0.1:{http_port}/v1/traces", "http/protobuf", first.spans()) == 4 * 5
        assert send_all(f"http://127.0.0.1:{grpc_port}", "grpc", second.spans()) == 2 * 5
        for run_id, store, rollouts in (("run-a", first, 4), ("run-b", second, 2)):
            path = f"/v1/projects/{urllib.parse.quote(run_id)}/spans?limit=1000"
            until(lambda path=path, rollouts=rollouts: len(answer(http_port, path) or ()) == rollouts * 5, 120)
            spans = answer(http_port, path)
            tree = {(span["context"]["span_id"], span["parent_id"] or "") for span in spans}
            assert tree == {(span["span_id"], span["parent_id"]) for span in store.spans()}
            tokens = sum(span["attributes"].get("llm.token_count.total", 0) for span in spans)
            assert tokens == rollouts * (100 + 101 + 102 + 3 * 7)
            failed = [span for span in spans if span["status_code"] == "ERROR"]
            assert [span["status_message"] for span in failed] == ["the host vanished"]
            assert {span["span_kind"] for span in spans} >= {"LLM", "AGENT"}


def spans_in(http_port: int, project: str, number: int) -> list[dict[str, Any]]:
    """What phoenix tells of the spans of a project, once it has all of them."""
    path = f"/v1/projects/{urllib.parse.quote(project)}/spans?limit=1000"
    until(lambda: len(answer(http_port, path) or ()) == number, 120)
    found: list[dict[str, Any]] = answer(http_port, path)
    return found


def named(segment: dict[str, Any]) -> str:
    """The span that a segment of the page's timeline is also recorded as; "" if it has none of its own."""
    match segment["name"].partition(".")[0], bool(segment["detail"]):
        case ("queue", True) | ("evaluate", True) if segment["name"].endswith("queue"):
            return names.POOL_QUEUE
        case ("boot", True) | ("evaluate", True) if segment["name"].endswith("boot"):
            return names.POOL_BOOT
        case ("tool", _):
            return f"{names.TOOL} {segment['name'].partition('.')[2]}"
        case _:
            return ""


@pytest.mark.namespaces
def test_the_slowest_rollouts_of_a_run_are_the_same_in_phoenix_and_on_the_page(
    tmp_path: Path, finished_run: RunDirectory
) -> None:
    """Names, parents and times within a millisecond; the page has no span of an engine's own, but its parts."""
    # An evaluator that was cancelled has not said how it spent the time.
    rows = [row for row in read_times(finished_run.path).rows if row.finished]
    slowest = sorted(rows, key=lambda row: -row.total_s)[:20]
    assert len(slowest) == 20
    timelines = {each.trace_id: each for row in slowest for each in read_timelines(finished_run.path, row.rollout_id)}
    spans = list(SpanFolder.of_run(finished_run.path).spans(traces=timelines))
    with phoenix(tmp_path) as (http_port, _):
        assert send_all(f"http://127.0.0.1:{http_port}/v1/traces", "http/protobuf", iter(spans)) == len(spans)
        shown = spans_in(http_port, finished_run.run_id(), len(spans))
    times = {each["context"]["span_id"]: [at_s(each["start_time"]), at_s(each["end_time"])] for each in shown}
    assert {(each["name"], each["context"]["span_id"], each["parent_id"] or "") for each in shown} == {
        (span["name"], span["span_id"], span["parent_id"]) for span in spans
    }
    for trace_id, timeline in timelines.items():
        of_trace = [each for each in shown if each["context"]["trace_id"] == trace_id]
        kinds = {each["name"] for each in of_trace}
        assert {"rollout", "sandbox.boot", "chat", "engine", "evaluate"} <= kinds, "sandbox, gateway, engine, evaluator"
        segments = timeline.to_json()["segments"]
        drawn = [[named(each), each["begin_at_s"], each["end_at_s"]] for each in segments if named(each)]
        # Shorter waits have no span.
        drawn = [each for each in drawn if each[0] != names.POOL_QUEUE or each[2] - each[1] >= MIN_QUEUE_S]
        turns: dict[int, list[float]] = {}
        for each in segments:
            # An engine that is paused for a push holds a call within its span.
            if each["name"].startswith("engine") or (each["name"] == "gate" and each["turn"] in turns):
                begin, end = turns.get(each["turn"], [float("inf"), 0.0])
                turns[each["turn"]] = [min(begin, each["begin_at_s"]), max(end, each["end_at_s"])]
        drawn += [[names.ENGINE, *times] for times in turns.values()]
        known = {each[0] for each in drawn}
        sent = [[each["name"], *times[each["context"]["span_id"]]] for each in of_trace if each["name"] in known]
        assert [each[0] for each in sorted(drawn)] == [each[0] for each in sorted(sent)]
        for ours, theirs in zip(sorted(drawn), sorted(sent), strict=True):
            assert ours[1:] == pytest.approx(theirs[1:], abs=1e-3), (ours, theirs)


def at_s(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
