"""What one small real run leaves: metrics, spans, checkpoints, summary, picture."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest

from headrace.actors.launch import status_of
from headrace.actors.metrics import read_metrics
from headrace.buffer.evidence import read_evidence
from headrace.buffer.verify import verify
from headrace.serve.observing.tracing import trace_id_for

if TYPE_CHECKING:
    from headrace.actors.run_directory import RunDirectory

pytestmark = [pytest.mark.namespaces, pytest.mark.timeout(300)]


def spans_of(directory: RunDirectory) -> dict[str, list[dict[str, Any]]]:
    """All spans of all processes by trace."""
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in (directory.path / "spans").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            span = json.loads(line)
            traces[span["trace_id"]].append(span)
    return traces


def test_rollouts_are_in_flight_during_every_push(finished_run: RunDirectory) -> None:
    pushes = [record for record in read_metrics(finished_run.metrics) if record["kind"] == "push"]
    assert [record["version"] for record in pushes] == [f"1.{step}" for step in range(7)]
    assert all(record["rollouts_in_flight"] > 0 for record in pushes[1:-1])
    assert all(len(record["updated"]) == 2 for record in pushes)
    assert verify(finished_run.path).mean_staleness > 0


def test_the_trace_of_an_attempt_is_the_tree_of_the_design(finished_run: RunDirectory) -> None:
    traces = spans_of(finished_run)
    attempts = read_evidence(finished_run.path).attempts
    attempt = next(attempt for attempt in attempts if attempt.turns == 2 and attempt.cause in ("solved", "failed"))
    assert attempt.trace_id == f"{trace_id_for(attempt.rollout_id, attempt.attempt):032x}"
    spans = traces[attempt.trace_id]
    names = {span["span_id"]: span["name"] for span in spans}
    edges = {(names.get(span["parent_id"]), span["name"]) for span in spans}
    assert edges >= {
        (None, "rollout"),
        ("rollout", "sandbox.boot"),
        ("rollout", "agent"),
        ("agent", "turn"),
        ("turn", "render"),
        ("turn", "engine"),
        ("agent", "tool"),
        ("rollout", "evaluate"),
        ("evaluate", "evaluate.check"),
        ("rollout", "buffer.offer"),
    }
    [root] = [span for span in spans if span["name"] == "rollout"]
    assert root["end_ns"] >= max(span["end_ns"] for span in spans), "the root ends at the receipt of the offer"
    assert sum(span["name"] == "turn" for span in spans) == 2
    [finish] = [span for span in spans if span["name"] == "session.finish"]
    assert finish["attributes"]["headrace.session.sampled_tokens"] > 0
    assert finish["attributes"]["headrace.session.rows"] == 1


def test_the_summary_tells_what_the_ledger_tells(finished_run: RunDirectory) -> None:
    summary = json.loads(finished_run.summary.read_text())
    report = verify(finished_run.path)
    assert json.loads((finished_run.path.parent / "out.json").read_text()) == summary
    assert summary["completed"]
    assert (summary["steps"], report.steps) == (6, 6)
    assert summary["versions"] == 7
    assert summary["mean_staleness"] == report.mean_staleness
    assert (summary["trained_twice"], summary["lost"], summary["sandboxes_leaked"]) == (0, 0, 0)
    assert summary["evaluation_answers"] == 4
    assert 0 < summary["train_wall_s"] < summary["total_wall_s"]
    assert finished_run.picture.read_bytes().startswith(b"\x89PNG")
    state = status_of(finished_run)
    assert (state["steps"], state["driven"], state["finished"]) == (6, False, True)
    assert set(state["held_out"]) == {"base", "final"}


def test_no_reward_without_an_evaluation_and_no_evaluation_of_infra(finished_run: RunDirectory) -> None:
    evidence = read_evidence(finished_run.path)
    for attempt in evidence.attempts:
        if attempt.offered and attempt.reward is None:
            assert attempt.cause in ("infra", "evaluator", "cancelled")
            assert not attempt.trained
