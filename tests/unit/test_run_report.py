"""What `headrace report` tells of a run directory."""

from __future__ import annotations

import io
import shutil
import sqlite3
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from headrace.actors.record.files.push_costs import push_record
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.report import RunReport, report_of
from headrace.actors.run.summary import summarize
from headrace.actors.simulation.virtual.plan import make_plan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.report import acceptance
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.records import RolloutState
from headrace.buffer.trajectories.breakdown import Breakdown
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.push.contract import EnginePush, PushReport
from headrace.policies.push.machine import PushOutcome

GOLDEN = Path(__file__).parents[1] / "golden" / "ledger"


def told_of(folder: Path, *, metrics: tuple[dict, ...] = ()) -> RunReport:
    directory = RunDirectory(path=shutil.copytree(GOLDEN, folder))
    directory.metrics.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in metrics))
    return report_of(directory)


def stations(seconds: float, sandboxes: float) -> dict:
    loads = {
        "sandbox": {"in_use": sandboxes, "capacity": 64, "mean_s": 9.0},
        "learner": {"in_use": 0.4, "capacity": 1, "mean_s": 1.0},
    }
    return {"kind": "stations", "time_s": 0.0, "seconds": seconds, "held_up_by": None, "stations": loads}


def test_the_report_agrees_with_the_ledger(tmp_path: Path) -> None:
    report, evidence = told_of(tmp_path / "run"), read_evidence(tmp_path / "run")
    checked = verify(tmp_path / "run")
    assert report.steps == checked.steps
    assert max(report.staleness) == checked.max_staleness_seen
    assert sum(report.causes.values()) == sum(attempt.cause is not None for attempt in evidence.attempts)
    assert sum(decile.finished for decile in report.deciles) == sum(
        attempt.reward is not None for attempt in evidence.attempts
    )
    assert report.early.groups > 0, "the golden ledger seals with a count"
    assert report.early.late >= report.early.late_finished
    document = orjson.loads(orjson.dumps(report.to_json()))
    assert document["steps"] == report.steps
    assert document["left_out"] == [asdict(group) for group in acceptance(evidence).left_out]
    assert len(document["left_out"]) == report.early.groups


def test_evicted_rollouts_are_counted_whether_or_not_they_were_issued_again(tmp_path: Path) -> None:
    """No rollout is issued again: each eviction is the end of one."""
    sizes = {"batch_size": 16, "group_size": 4, "slots": 40, "tasks": 64, "turns": 1, "max_staleness": 2, "steps": 10}
    plan = make_plan("swe64", sizes, ["buffer.max_evictions=0"])
    account, _ = run_plan(plan, tmp_path / "run")
    report, evidence = report_of(RunDirectory(path=tmp_path / "run")), read_evidence(tmp_path / "run")
    assert {rollout.evictions for rollout in evidence.rollouts} == {0}
    ended = sum(rollout.state is RolloutState.EVICTED for rollout in evidence.rollouts)
    assert report.evicted == account.evicted == ended > 0
    came_back = read_evidence(GOLDEN)
    assert acceptance(came_back).evicted == sum(rollout.evictions for rollout in came_back.rollouts) > 0


def test_the_report_names_the_full_station(tmp_path: Path) -> None:
    report = told_of(tmp_path / "run", metrics=(stations(30.0, 64.0), stations(10.0, 56.0)))
    assert report.held_up_by == "sandbox"
    sandbox, learner = report.stations
    assert (sandbox.in_use, learner.utilisation) == (62.0, 0.4)


def phase_lock(seconds: float, in_flight: float, evaluating: float) -> dict:
    """Nothing with a size is full; `evaluating` rollouts are in the evaluator."""
    record = stations(seconds, 4.0)
    record["stations"]["evaluator"] = {"in_use": evaluating, "capacity": None, "mean_s": 5.0}
    return record | {"in_flight": in_flight}


def test_the_report_names_an_unbounded_service_holding_nearly_all_rollouts(tmp_path: Path) -> None:
    locked = (phase_lock(30.0, 32.0, 31.0), phase_lock(10.0, 16.0, 15.0))
    report = told_of(tmp_path / "locked", metrics=locked)
    assert report.held_up_by == "evaluator"
    assert "held up by evaluator" in text_of(report)
    assert "station evaluator 27.0 in use, 5 s a rollout" in text_of(report)
    directory = RunDirectory(path=tmp_path / "locked")
    directory.append_session(0.0, 1.0)
    assert summarize(directory, completed=True).held_up_by == "evaluator"
    free = (phase_lock(30.0, 32.0, 31.0), phase_lock(30.0, 32.0, 15.0))
    assert told_of(tmp_path / "free", metrics=free).held_up_by is None
    old = tuple({key: value for key, value in record.items() if key != "in_flight"} for record in locked)
    assert told_of(tmp_path / "old", metrics=old).held_up_by is None


def evaluation(tag: str, success: float, mean_reward: float) -> dict:
    return {
        "kind": "evaluation",
        "tag": tag,
        "success": success,
        "mean_reward": mean_reward,
        "answers": 8,
        "infra": 0,
        "time_s": 0.0,
    }


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ((0.25, 0.75), "held-out success 25.0% -> 75.0%   (8 sampled answers)"),
        ((0.4, 0.85), "held-out success 25.0% -> 75.0%, reward 0.400 -> 0.850   (8 sampled answers)"),
    ],
)
def test_the_summary_shows_graded_rewards_beside_success(
    tmp_path: Path, rewards: tuple[float, float], line: str
) -> None:
    told_of(tmp_path / "run", metrics=(evaluation("base", 0.25, rewards[0]), evaluation("final", 0.75, rewards[1])))
    directory = RunDirectory(path=tmp_path / "run")
    directory.append_session(0.0, 1.0)
    summary = summarize(directory, completed=True)
    assert summary.lines()[0] == line
    assert (summary.base_reward, summary.final_reward) == rewards


def test_the_report_names_a_service_that_blocks_with_its_share_of_the_time(tmp_path: Path) -> None:
    """F14: the time share of each service, and the one that holds the run up."""
    record = stations(10.0, 64.0) | {"in_flight": 64.0}
    record["stations"]["service.user"] = {"in_use": 48.0, "capacity": 64, "mean_s": 30.0}
    calls = {"calls": 20, "failures": 1, "retries": 4, "waiting_s": 2.0, "calling_s": 30.0, "cost": 0.5}
    services = {"kind": "services", "time_s": 0.0, "seconds": 10.0, "services": {"user": calls}}
    report = told_of(tmp_path / "run", metrics=(record, services, services))
    assert report.held_up_by == "service.user"
    assert (report.services["user"].calls, report.service_shares) == (40, {"user": 0.75})
    assert "held up by service.user" in text_of(report)
    line = "service user: 40 calls, 2 failed, 8 retries, 1.5 s a call, 0.1 s waiting, cost 1, 75% of the rollouts' time"
    assert line in text_of(report)
    assert orjson.loads(orjson.dumps(report.to_json()))["services"]["user"]["cost"] == 1.0


def test_the_report_names_what_slowed_the_run_down(tmp_path: Path) -> None:
    limits = ((32, ""), (22, "engines are full"), (15, "boot takes 9 s"), (19, "boot takes 9 s"))
    slow = [stations(10.0, 4.0) | {"rollout_limit": limit, "slowed_by": reason} for limit, reason in limits]
    report = told_of(tmp_path / "run", metrics=(stations(10.0, 4.0), *slow))
    assert (report.slowed_to, report.slowed_by) == (15, "boot takes 9 s")
    assert told_of(tmp_path / "other", metrics=(stations(10.0, 4.0),)).slowed_to is None


def pushed(*, gate_s: float, since_s: float | None) -> dict:
    engines = tuple(
        EnginePush(
            engine_id=EngineId(name),
            outcome=outcome,
            gate_s=gate_s,
            transfer_s=0.5,
            received_bytes=size,
            retracted=3,
            recomputed_tokens=100,
        )
        for name, outcome, size in (("a", PushOutcome.UPDATED, 10**9), ("b", PushOutcome.QUARANTINED, 0))
    )
    report = PushReport(
        push_id="p",
        version=PolicyVersion(1, 2),
        engines=engines,
        seconds={"gate": 0.1, "broadcast": 1.0},
        total_s=1.5,
        sent_bytes=10**9,
        sender_failure=None,
    )
    record = push_record(report, rollouts_in_flight=8, since_s=since_s)
    return {"kind": record.kind, "time_s": 0.0} | record.document()


def test_push_costs_are_reported_as_the_share_of_time_with_closed_gates(tmp_path: Path) -> None:
    """The first one has no time before it; of the others, 2 engines x 0.5 s of 10 s and 2 x 1.5 s of 30 s."""
    records = (
        pushed(gate_s=7.0, since_s=None),
        pushed(gate_s=0.5, since_s=10.0),
        pushed(gate_s=1.5, since_s=30.0),
        {"kind": "step", "push_s": 0.25},
        {"kind": "step", "push_s": 0.5},
    )
    assert [record["stall_share"] for record in records[:3]] == [None, 0.05, 0.05]
    costs = told_of(tmp_path / "run", metrics=records).pushes
    assert costs is not None
    assert costs.stall_share == 0.05
    assert (costs.pushes, costs.gb_per_s, costs.learner_waited_s) == (3, 2.0, 0.75)
    assert (costs.requests_retracted, costs.tokens_recomputed, costs.quarantined) == (18, 600, 3)
    assert costs.seconds == pytest.approx({"gate": 0.1, "broadcast": 1.0})
    assert "stalled for 5.0% of their time" in text_of(told_of(tmp_path / "again", metrics=records))
    old = ({"kind": "push", "time_s": 0.0, "total_s": 1.0, "quarantined": []},)
    assert told_of(tmp_path / "old", metrics=old).pushes is None


def text_of(report: RunReport) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.tables())
    return console.export_text()


def test_a_critic_is_rated_by_the_last_ten_steps_that_measured_it(tmp_path: Path) -> None:
    steps = tuple({"kind": "step", "explained_variance": value} for value in [-5.0] * 3 + [0.5, 0.7] * 5)
    report = told_of(tmp_path / "run", metrics=(*steps, {"kind": "step"}))
    assert report.explained_variance == pytest.approx(0.6)
    assert "critic: explained variance 0.600" in text_of(report)
    assert told_of(tmp_path / "other").explained_variance is None


def test_the_report_names_what_collapsed_and_what_still_lasts(tmp_path: Path) -> None:
    fails = {"rollouts": 8, "invalid": 0, "groups": 1, "flat_groups": 1}
    families = [{"write": fails, "move": fails}] * 3 + [{"write": fails, "move": fails | {"flat_groups": 0}}]
    steps = tuple({"kind": "step", "step": step, "families": each} for step, each in enumerate(families, 1))
    report = told_of(tmp_path / "run", metrics=steps)
    assert [(found.name, found.since, found.until) for found in report.collapses] == [
        ("move", 3, 4),
        ("write", 3, None),
    ]
    text = text_of(report)
    assert "COLLAPSE: move collapsed at step 3 until step 4: all groups" in text
    assert "learner.entropy_coef" in text
    assert "COLLAPSE" not in text_of(told_of(tmp_path / "other"))


def test_the_report_says_when_little_of_what_is_sampled_is_trained(tmp_path: Path) -> None:
    assert told_of(tmp_path / "old").coverage.sessions == 0, "a ledger without the figures"
    folder, sizes = tmp_path / "run", {"batch_size": 4, "group_size": 4, "slots": 8, "tasks": 8, "turns": 1, "steps": 3}
    run_plan(make_plan("swe64", sizes, []), folder)
    whole = report_of(RunDirectory(path=folder)).coverage
    assert whole.sessions >= 9
    assert (whole.trained, whole.alarm) == (whole.sampled, "")
    labels = {"sampled_tokens": 40, "trained_tokens": 8, "masked": "abandoned"}
    breakdown = Breakdown(labels=labels).to_json()
    for name in ("ledger.db", "archive.db"):
        with closing(sqlite3.connect(folder / name)) as database, database:
            database.execute("UPDATE attempts SET breakdown = ?", (breakdown,))
    report = report_of(RunDirectory(path=folder))
    assert (report.coverage.sessions, report.coverage.masked) == (whole.sessions, {"abandoned": whole.sessions * 32})
    assert (
        f"coverage of the last {whole.sessions} attempts: 20% of the sampled tokens are trained (abandoned)"
        in text_of(report)
    )


def test_the_report_has_a_readable_text_form(tmp_path: Path) -> None:
    report = told_of(tmp_path / "run", metrics=(stations(30.0, 64.0) | {"rollout_limit": 8, "slowed_by": "boot"},))
    text = text_of(report)
    assert "held up by sandbox" in text
    finished = sum(decile.evicted for decile in report.deciles)
    assert f"exceeded the staleness bound: {report.evicted}, of which {finished} had finished" in text
    assert "slowed down to 8 rollouts: boot" in text
    assert "duration up to" in text
    assert f"{report.early.groups} groups were sealed early" in text
