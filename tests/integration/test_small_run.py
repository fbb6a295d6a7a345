"""What one small real run leaves: metrics, spans, checkpoints, summary, picture."""

from __future__ import annotations

import json
import stat
import time
from collections import defaultdict
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.actors.cluster.runs.log_pages import read_logs
from headrace.actors.record.files.log_lines import logs_in
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.rollouts.answers import read_answers
from headrace.actors.run.launch import reopen
from headrace.actors.run.report import report_of
from headrace.actors.run.run_status import status_of
from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.buffer.audit.evidence import read_evidence, read_only
from headrace.buffer.audit.verify import verify
from headrace.buffer.tasks.task import load_tasks, tasks_digest
from headrace.sandboxes.host.leftovers import sandboxes_left
from headrace.serve.tracing.tracing import trace_id_for
from support import run_rig as rig
from support.environments import read_environments

pytestmark = [pytest.mark.core, pytest.mark.namespaces, pytest.mark.timeout(900)]


PROGRAMS = ("headrace.policies.cpu_engine", "headrace.policies.push.sender", "headrace-launcher", "bash", "python3")
"""Parts of the commands of processes that a run starts: engine, sender, launcher, and programs in sandboxes."""
OF_RAY = ("ray::", "/ray/", "/headrace run ")
"""Parts of the commands of Ray's own processes, which need its token, of its actors, and of the driver, which a process
has until it runs its own program."""


def test_no_child_process_has_a_token_or_a_key(finished_run: RunDirectory) -> None:
    seen = read_environments(finished_run.path.parent / "environments.json")
    others = [program for program in seen if not any(mark in program.command for mark in OF_RAY)]
    for name in PROGRAMS:
        assert any(name in program.command for program in others), (name, [program.command for program in others])
    for program in others:
        assert not [name for name in program.environment if name.startswith("RAY_AUTH")], program.command
        assert not rig.SECRETS.keys() & program.environment.keys(), program.command
    key = (finished_run.path / "engines" / "key").read_text().strip()
    assert not [program.command for program in seen if key in f"{program.command} {program.environment}"]
    assert stat.S_IMODE((finished_run.path / "engines" / "key").stat().st_mode) == 0o600


def spans_of(directory: RunDirectory) -> dict[str, list[dict[str, Any]]]:
    """All spans of all processes by trace."""
    traces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in SpanFolder.of_run(directory.path).spans():
        traces[span["trace_id"]].append(span)
    return traces


def test_rollouts_are_in_flight_during_every_push(finished_run: RunDirectory) -> None:
    pushes = [record for record in read_metrics(finished_run.metrics) if record["kind"] == "push"]
    assert [record["version"] for record in pushes] == [f"1.{step}" for step in range(7)]
    # A push that a busy machine holds up finds the buffer full and nothing under way.
    assert sum(record["rollouts_in_flight"] > 0 for record in pushes[1:-1]) >= 3
    assert all(len(record["updated"]) == 2 for record in pushes)
    assert verify(finished_run.path).mean_staleness > 0


def test_an_attempts_trace_has_the_documented_span_tree(finished_run: RunDirectory) -> None:
    traces = spans_of(finished_run)
    attempts = read_evidence(finished_run.path).attempts
    attempt = next(attempt for attempt in attempts if attempt.turns == 2 and attempt.cause in ("solved", "failed"))
    assert attempt.trace_id == f"{trace_id_for(finished_run.run_id(), attempt.rollout_id, attempt.attempt):032x}"
    spans = traces[attempt.trace_id]
    # The names of agents and tools follow the names of their spans.
    names = {span["span_id"]: span["name"].partition(" ")[0] for span in spans}
    edges = {(names.get(span["parent_id"]), names[span["span_id"]]) for span in spans}
    assert edges >= {
        (None, "rollout"),
        ("rollout", "sandbox.boot"),
        ("rollout", "invoke_agent"),
        ("invoke_agent", "chat"),
        ("sandbox.boot", "pool.boot"),
        ("chat", "engine"),
        ("invoke_agent", "execute_tool"),
        ("rollout", "evaluate"),
        ("evaluate", "evaluate.check"),
        ("rollout", "buffer.offer"),
    }
    [root] = [span for span in spans if span["name"] == "rollout"]
    assert root["end_ns"] >= max(span["end_ns"] for span in spans), "the root ends at the receipt of the offer"
    assert sum(span["name"] == "chat" for span in spans) == 2
    [finish] = [span for span in spans if span["name"] == "session.finish"]
    assert finish["attributes"]["headrace.session.sampled_tokens"] > 0
    assert finish["attributes"]["headrace.session.rows"] == 1


def test_steps_pushes_and_evaluations_are_traces_that_lead_to_rollouts(finished_run: RunDirectory) -> None:
    spans = [span for trace in spans_of(finished_run).values() for span in trace]
    roots = {span["span_id"]: span for span in spans if span["name"] == "rollout"}
    steps = [span for span in spans if span["name"] == "step" and span.get("links")]
    assert len(steps) == 6
    for step in steps:
        assert len(step["links"]) == step["attributes"]["headrace.step.rollouts"]
        for link in step["links"]:
            root = roots[link["span_id"]]
            assert root["trace_id"] == link["trace_id"]
            assert root["attributes"]["headrace.rollout.id"] == link["attributes"]["headrace.rollout.id"]
            assert link["attributes"]["headrace.step.staleness"] >= 0
    pushes = [span["attributes"] for span in spans if span["name"] == "push"]
    assert {push["headrace.push.version"] for push in pushes} == {f"1.{step}" for step in range(7)}
    tags = {span["attributes"]["headrace.evaluation.tag"] for span in spans if span["name"] == "evaluation"}
    answers = [each["attributes"] for each in roots.values()]
    assert {"base", "final"} <= tags
    assert {each.get("headrace.evaluation.tag") for each in answers} - {None} == tags


def test_the_parts_of_every_attempt_add_up_and_little_is_unexplained(finished_run: RunDirectory) -> None:
    evidence = read_evidence(finished_run.path)
    found = [one.breakdown for one in evidence.attempts if one.cause in ("solved", "failed")]
    assert all(breakdown is not None for breakdown in found)
    breakdowns = [breakdown for breakdown in found if breakdown is not None]
    for breakdown in breakdowns:
        assert abs(sum(breakdown.parts_s.values()) - breakdown.wall_s) < 0.01
        assert breakdown.labels["engines"]
        assert {"boot", "tool.run", "evaluate.check"} <= set(breakdown.parts_s)
        assert any(part.startswith("engine") for part in breakdown.parts_s)
    # Turns are placed by when the worker heard of the session's end: late ones may lie below a tool's time.
    decoded = [breakdown for breakdown in breakdowns if "engine.decode" in breakdown.parts_s]
    assert len(decoded) > 0.8 * len(breakdowns)
    wall_s = sum(breakdown.wall_s for breakdown in breakdowns)
    other_s = sum(breakdown.parts_s.get("other", 0.0) for breakdown in breakdowns)
    assert other_s <= 0.05 * wall_s  # between phases an attempt waits for its event loop: 2.3 % on two slow cores
    with closing(read_only(finished_run.path / "ledger.db")) as ledger:
        (lacking,) = ledger.execute("SELECT count(*) FROM evaluations WHERE breakdown IS NULL").fetchone()
    assert lacking == 0, "evaluations have one too"


def test_each_actor_has_a_log_from_its_start_to_its_end(finished_run: RunDirectory) -> None:
    actors = "dispatcher engines evaluator gateway gateway.1 learner replay sandbox-pool service worker-0"
    assert " ".join(logs_in(finished_run.logs)) == actors
    page = read_logs(finished_run.logs, None, after="", limit_bytes=1 << 30)
    events = [json.loads(line) for line in page.lines]
    assert {event["run"] for event in events} == {finished_run.run_id()}
    for actor in actors.split():
        its = [event["message"] for event in events if event["actor"] == actor]
        assert its[0].endswith(" starts")
        assert its[-1].endswith(" is closed")


def test_the_sessions_of_a_run_are_spread_over_its_gateways(finished_run: RunDirectory) -> None:
    sessions = [len(list((finished_run.path / name).iterdir())) for name in ("sessions", "sessions.1")]
    assert min(sessions) > 0.2 * sum(sessions)


def test_the_summary_agrees_with_the_ledger(finished_run: RunDirectory) -> None:
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
    state = status_of(*reopen(finished_run.path))
    assert (state["steps"], state["total_steps"], state["state"], state["finished"]) == (6, 6, "finished", True)
    assert set(state["held_out"]) == {"base", "final"}


def test_engines_and_learner_agree_about_the_tokens_of_the_trained_version(finished_run: RunDirectory) -> None:
    steps = read_metrics(finished_run.metrics, ("step",))
    # A batch in which every group's rewards are equal computes nothing.
    computed = [step for step in steps if step["computed_tokens"]]
    assert computed
    for step in computed:
        if step["max_staleness"] == 0:
            assert step["mismatch"]["tokens"] == step["computed_tokens"]
        assert {int(staleness) for staleness in step["ratio_by_staleness"]} <= set(
            range(int(step["max_staleness"]) + 1)
        )
        assert sum(entry["tokens"] for entry in step["ratio_by_staleness"].values()) == step["computed_tokens"]
        assert 0 <= step["padding_share"] < 1
        assert 0 <= step["capped_share"] <= 1
        assert step["stale_kv"] is None
        assert step["mismatch"] is None or step["mismatch"]["max_abs_log_ratio"] < 1e-3
    report = report_of(finished_run)
    assert report.drift is not None
    assert report.drift.mismatch is not None
    assert report.drift.alarms == 0
    assert report.drift.mismatch.mean_abs_log_ratio < 1e-4
    assert report.drift.by_staleness["1"].mean_abs_log_ratio > report.drift.mismatch.mean_abs_log_ratio


def test_the_final_evaluation_rates_the_last_checkpoint(finished_run: RunDirectory) -> None:
    [final] = [record for record in read_metrics(finished_run.metrics, ("evaluation",)) if record["tag"] == "final"]
    best = report_of(finished_run).best
    assert best is not None
    assert (best.version, best.tag, best.success) == ("1.6", "final", final["success"])


def test_rewards_require_an_evaluation_and_infra_failures_are_not_evaluated(finished_run: RunDirectory) -> None:
    evidence = read_evidence(finished_run.path)
    for attempt in evidence.attempts:
        if attempt.offered and attempt.reward is None:
            assert attempt.cause in ("infra", "evaluator", "cancelled")
            assert not attempt.trained


def temperatures(spans: list[dict[str, Any]]) -> set[float]:
    """At which the turns of a trace were sampled."""
    return {span["attributes"]["gen_ai.request.temperature"] for span in spans if span["name"] == "chat"}


def test_training_and_evaluations_have_separate_sampling_settings(finished_run: RunDirectory) -> None:
    traces = spans_of(finished_run)
    attempts = [attempt for attempt in read_evidence(finished_run.path).attempts if attempt.turns and attempt.trained]
    assert {temperature for attempt in attempts for temperature in temperatures(traces[attempt.trace_id])} == {1.0}
    sampled = []
    for name in ("ledger.db", "archive.db"):  # evaluations that have ended are moved
        with closing(read_only(finished_run.path / name)) as database:
            sampled += database.execute("SELECT sampled FROM evaluations WHERE reward IS NOT NULL").fetchall()
    assert len(sampled) == 8
    assert all(json.loads(versions) for (versions,) in sampled), "greedy tokens are never trained and were sampled"
    document = json.loads((finished_run.path / "evaluations" / "base" / "summary.json").read_bytes())
    assert (document["sampling"]["temperature"], document["sampling"]["top_p"]) == (0.0, 1.0)


def test_every_answer_in_an_evaluation_is_stored(finished_run: RunDirectory) -> None:
    summaries = {
        record["tag"]: record for record in read_metrics(finished_run.metrics) if record["kind"] == "evaluation"
    }
    traces = spans_of(finished_run)
    for tag, version in (("base", "1.0"), ("final", "1.6")):
        folder = finished_run.path / "evaluations" / tag
        document = json.loads((folder / "summary.json").read_bytes())
        answers = read_answers(folder / "results.jsonl")
        assert len({answer.rollout_id for answer in answers}) == len(answers) == document["n"] == 4
        assert document["success"] == summaries[tag]["success"]
        assert document["dataset_sha256"] == tasks_digest(load_tasks(finished_run.heldout_tasks)[:4])
        assert set(document["versions"]) == {version}
        for answer in answers:
            kept = folder / "rollouts" / answer.folder
            turns = [json.loads(line) for line in (kept / "conversation.jsonl").read_text().splitlines()]
            assert sum(turn["sampled_tokens"] for turn in turns) == answer.sampled_tokens
            assert len(turns) == answer.turns
            assert turns[0]["parent"] == ""
            assert {turn["parent"] for turn in turns[1:]} <= {turn["turn_id"] for turn in turns}
            metadata = json.loads((kept / "metadata.json").read_bytes())
            assert (metadata["cause"], metadata["reward"]) == (answer.cause, answer.reward)
            assert metadata["session"]["sampled_tokens"] == answer.sampled_tokens
            if answer.cause != "invalid":
                assert (kept / "evaluator.log").read_text().startswith(("solved", "failed"))
            spans = traces[answer.trace_id]
            assert any(span["name"] == "rollout" for span in spans)
            assert temperatures(spans) == {0.0}
    kept = list((finished_run.path / "evaluations").glob("*/rollouts/*/patch.diff"))
    assert all(path.read_text().startswith("--- ") for path in kept)
    ledger = read_evidence(finished_run.path)
    assert not {group.group_id for group in ledger.groups} & {"base", "final"}


@pytest.mark.whole
def test_a_killed_evaluation_of_a_checkpoint_resumes_and_changes_no_ledger(
    finished_run: RunDirectory, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    before = read_evidence(finished_run.path)
    wanted = ("eval", str(finished_run.path), "--checkpoint", "1.3", "--samples", "4", "--limit", "12", "--quiet")
    sampling = ("--set", "evaluation.sampling.temperature=0.7", "--set", "evaluation.sampling.top_k=40")
    arguments = (*wanted, *sampling, "--out", str(out), "--json", str(tmp_path / "summary.json"))
    first = rig.start_driver(*arguments)
    try:
        while not read_answers(out / "results.jsonl"):
            assert first.poll() is None, first.communicate()[1].decode()
            time.sleep(0.05)
    finally:
        family = psutil.Process(first.pid).children(recursive=True)
        first.kill()
        first.communicate()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=60)
    recorded = read_answers(out / "results.jsonl")
    assert not (out / "summary.json").exists()
    second = rig.start_driver(*arguments)
    _, errors = second.communicate(timeout=200)
    assert second.returncode == 0, errors.decode()
    answers, spans = read_answers(out / "results.jsonl"), spans_of(RunDirectory(path=out / "service"))
    assert answers[: len(recorded)] == recorded
    assert len({answer.rollout_id for answer in answers}) == len(answers) == 48
    document = json.loads((out / "summary.json").read_bytes())
    assert json.loads((tmp_path / "summary.json").read_bytes()) == document | {"out": str(out)}
    assert (document["n"], set(document["versions"])) == (48, {"1.3"})
    assert document["model"] == str(finished_run.checkpoints / "1.3")
    assert set(document["pass_at_k"]) == {"1", "2", "4"}
    assert (document["sampling"]["temperature"], document["sampling"]["top_k"]) == (0.7, 40)
    assert {temperature for answer in answers for temperature in temperatures(spans[answer.trace_id])} == {0.7}
    assert sandboxes_left(out / "service") == 0
    assert read_evidence(finished_run.path) == before
    assert not finished_run.is_driven()


@pytest.mark.slow
def test_a_run_pushes_by_disk(tmp_path: Path) -> None:
    """The embedded learner writes one file for each version; its engines read directories."""
    settings = ("training.steps=4", "training.save_every=2", "push.transport=disk")
    options = [argument for setting in settings for argument in ("--set", setting)]
    outputs = ("--runs-dir", str(tmp_path), "--name", "run", "--quiet")
    driver = rig.start_driver("run", str(rig.RECIPE), *outputs, *rig.small_arguments(), *options)
    _, errors = driver.communicate(timeout=800)
    assert driver.returncode == 0, errors.decode()
    pushes = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["kind"] == "push"]
    assert [record["version"] for record in pushes] == [f"1.{step}" for step in range(5)]
    assert all(len(record["updated"]) == 2 for record in pushes)
    assert all(record["seconds"]["form"] == 0 < record["seconds"]["broadcast"] for record in pushes)
    weights = tmp_path / "run" / "engines" / "weights"
    assert {path.name for path in weights.iterdir()} == {"1.3", "1.4"}
    assert verify(tmp_path / "run").steps == 4


def test_the_steps_count_the_invalid_answers_of_each_family(finished_run: RunDirectory) -> None:
    evidence = read_evidence(finished_run.path)
    attempts = {(attempt.rollout_id, attempt.attempt): attempt for attempt in evidence.attempts}
    members = {batch.batch_id: batch.members for batch in evidence.batches}
    steps = read_metrics(finished_run.metrics, ("step",))
    assert len(steps) == 6
    for step in steps:
        trained = [attempts[member.rollout_id, member.attempt] for member in members[step["batch_id"]]]
        parts = step["families"]
        assert all(name.startswith("terminal/") for name in parts)
        assert sum(part["rollouts"] for part in parts.values()) == len(trained)
        assert sum(part["invalid"] for part in parts.values()) == sum(each.cause == "invalid" for each in trained)
        assert sum(part["groups"] for part in parts.values()) == len({each.rollout_id[:7] for each in trained})
