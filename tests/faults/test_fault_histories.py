"""Runs under seeded storms of faults, in virtual time. A failing seed prints the command that makes it again."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from headrace.actors.cli.app import app
from headrace.actors.errors import ActorError
from headrace.actors.rollouts.dispatcher import Dispatcher
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.simulation.virtual.faults import FaultReport, History, Storm, prepare_storm, simulate_faults
from headrace.actors.simulation.virtual.faulty_runtime import CallFaults, FaultyRuntime
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.training.learner import LearnerLoop, Stage
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.groups import GroupBook
from headrace.buffer.core.staleness import StalenessBound
from headrace.buffer.ledger.ledger import Ledger
from headrace.buffer.trajectories.types import Batch, Cause, ReceiptStatus, StepReport
from headrace.policies.errors import RowUnusable
from headrace.policies.learners.simulated import SimulatedLearner
from headrace.sandboxes.simulated.provider import SimulationConfig

IN_CI = 50
SLOW = 1000
FOUND = (105, 196, 278, 298, 755)
"""Histories that showed a defect when they were first seen: orders whose handing over was broken off at the end, a
worker that died and came back between two calls, one that was reset twice, a dispatcher that waited for others longer
than a restart may take, a worker that asked no more for engines that were away for minutes."""


def quietly(seed: int) -> FaultReport:
    """A storm logs every death; that is not what anybody wants to read here."""
    logging.disable(logging.CRITICAL)
    try:
        return simulate_faults(seed)
    finally:
        logging.disable(logging.NOTSET)


def broken(reports: Iterable[FaultReport]) -> list[str]:
    return [f"{report.replay}: {report.problems[0]}" for report in reports if report.problems]


@pytest.mark.slow(but_first=True)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, IN_CI, 10))
def test_invariants_hold_under_faults(first: int) -> None:
    assert broken(quietly(seed) for seed in range(first, first + 10)) == []


@pytest.mark.timeout(300)
def test_invariants_hold_for_seeds_that_failed_before() -> None:
    assert broken(map(quietly, FOUND)) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_invariants_hold_in_a_thousand_fault_storms() -> None:
    with ProcessPoolExecutor(os.cpu_count()) as processes:
        assert broken(processes.map(quietly, range(IN_CI, IN_CI + SLOW), chunksize=10)) == []


class LearnerDies(History):
    """Nothing strikes but once: the learner, nine steps after the last checkpoint."""

    async def _inject_faults(self, runtime: FaultyRuntime) -> None:
        committed = 0
        while committed < 9:
            await asyncio.sleep(1.0)
            if "replay" in runtime.cells:
                committed = (await runtime.actor("replay", Replay).status()).steps_committed
        runtime.cells["learner"].kill("struck")


def test_a_crash_nine_steps_after_a_checkpoint_costs_no_rollout(tmp_path: Path) -> None:
    """With the defaults (a checkpoint every ten steps, a bound of 4) it dissolved six batches and cancelled nearly all
    that was in flight."""
    plan = SimulationPlan(
        batch_size=8,
        group_size=4,
        slots=32,
        workers=1,
        steps=14,
        save_every=10,
        max_staleness=4,
        durations=DurationsConfig(mean_s=40.0, median_s=30.0, cap_s=150.0),
        learner_s=60.0,
        push_s=1.0,
        tasks=24,
        turns=3,
    )
    directory = prepare_storm(tmp_path / "run", plan)
    calls = CallFaults(delay_s=0.01, slow=0, slow_s=1, lost=0, answer_lost=0, repeated=0, restart_s=1)
    storm = Storm(
        plan=plan, calls=calls, host=SimulationConfig(capacity=64), lasts_s=1.0, between_s=1.0, driver_deaths=0
    )
    history = LearnerDies(seed=1, storm=storm, directory=directory)
    history.play()
    report = history.report()
    assert (report.problems, report.steps) == ((), 14)
    with closing(sqlite3.connect(directory.path / "ledger.db")) as ledger:
        counters = dict(ledger.execute("SELECT name, value FROM counters"))
    evidence = read_evidence(directory.path)
    [back_s] = [commit.committed_at_s for commit in evidence.commits if str(commit.version) == "2.9"]
    resumed = evidence.epochs[1]
    cancelled = [
        attempt.key
        for attempt in evidence.attempts
        if attempt.cause is Cause.CANCELLED and resumed.opened_at_s <= (attempt.ended_at_s or 0) <= back_s
    ]
    again = [
        attempt.key
        for attempt in evidence.attempts
        if attempt.attempt > 1 and resumed.opened_at_s <= attempt.issued_at_s <= back_s
    ]
    assert str(resumed.follows) == "1.9"
    assert counters["batches_rolled_back"] == 9
    assert "batches_dissolved" not in counters
    assert (cancelled, again) == ([], []), "while the learner came back nothing was cancelled and nothing run again"


def one_run(path: Path, kind: type[History], **changes: Any) -> tuple[History, str]:
    """A small run without a storm; how it ended, empty when it went to its end."""
    plan = SimulationPlan(
        batch_size=4,
        group_size=2,
        slots=8,
        workers=1,
        steps=6,
        save_every=10,
        durations=DurationsConfig(mean_s=40.0, median_s=30.0, cap_s=150.0),
        learner_s=5.0,
        push_s=1.0,
        tasks=24,
        turns=3,
        **changes,
    )
    directory = prepare_storm(path, plan)
    calls = CallFaults(delay_s=0.01, slow=0, slow_s=1, lost=0, answer_lost=0, repeated=0, restart_s=1)
    storm = Storm(
        plan=plan, calls=calls, host=SimulationConfig(capacity=64), lasts_s=1.0, between_s=1.0, driver_deaths=0
    )
    history = kind(seed=1, storm=storm, directory=directory)
    history.play()
    return history, "; ".join(history.problems)


class Quiet(History):
    async def _inject_faults(self, runtime: FaultyRuntime) -> None:
        """Nothing strikes."""


@pytest.mark.parametrize(
    ("error", "learners"),
    [
        (RowUnusable("row 1 of g000001-0: the first token of a row has no context"), 1),
        (MemoryError("out of memory"), 2),
    ],
)
def test_an_untrainable_batch_ends_the_run_after_two_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, learners: int
) -> None:
    """A refused row is tried again in place, anything else by a new learner; the batch is the third."""
    step = SimulatedLearner.step

    async def failing(learner: SimulatedLearner, batch: Batch) -> StepReport:
        if batch.lease.batch_id == "b000003":
            raise error
        return await step(learner, batch)

    monkeypatch.setattr(SimulatedLearner, "step", failing)
    _, ended = one_run(tmp_path / "run", Quiet)
    assert (
        f"BatchUntrainable: batch b000003 was tried 2 times without success: {type(error).__name__}: {error}" in ended
    )
    assert "the longest row has" in ended
    assert "headrace ledger repair RUN --drop-batch b000003" in ended
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.db")) as ledger:
        assert ledger.execute("SELECT max(epoch) FROM epochs").fetchone() == (learners,)
        assert ledger.execute("SELECT tries FROM batches WHERE batch_id = 'b000003'").fetchone() == (2,)


def test_rows_refused_in_a_step_are_filtered_and_the_run_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, refused = SimulatedLearner.step, set[str]()

    async def refusing(learner: SimulatedLearner, batch: Batch) -> StepReport:
        """Refuse the first member of each of the first three batches."""
        first = batch.items[0].rollout_id
        if len(refused) < 3:
            refused.add(first)
            raise RowUnusable("1 of 4 rollouts", {first: "a row is too long"})
        return await step(learner, batch)

    monkeypatch.setattr(SimulatedLearner, "step", refusing)
    history, ended = one_run(tmp_path / "run", Quiet)
    assert (ended, history.restarts) == ("", 0)
    report = verify(tmp_path / "run")
    assert (report.problems, report.steps, report.filtered) == ((), 6, 3)
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.db")) as ledger:
        assert ledger.execute("SELECT max(epoch) FROM epochs").fetchone() == (1,), "no learner had to die"
    attempts = read_evidence(tmp_path / "run").attempts
    assert {one.rollout_id for one in attempts if one.detail == "refused by the learner: a row is too long"} == refused


class StepKills(History):
    """The learner's process is killed in each step on the third batch."""

    async def _inject_faults(self, runtime: FaultyRuntime) -> None:
        while True:
            await asyncio.sleep(0.5)
            if "learner" not in runtime.cells:
                continue
            with suppress(ActorError):
                status = await runtime.actor("learner", LearnerLoop).status()
                if status.stage is Stage.STEPPING and status.version is not None and status.version.step == 2:
                    runtime.cells["learner"].kill("struck")


def test_a_batch_that_kills_the_learner_ends_the_run_after_two_attempts(tmp_path: Path) -> None:
    _, ended = one_run(tmp_path / "run", StepKills)
    assert "BatchUntrainable: batch b000003 was tried 2 times" in ended
    assert "the learner's process died in the step" in ended
    assert verify(tmp_path / "run").problems == ()


class WeightsVanish(History):
    """Engines and learner are killed together during the base evaluation, and the engines' journal is lost."""

    async def _inject_faults(self, runtime: FaultyRuntime) -> None:
        evaluating = 0
        while not evaluating:
            await asyncio.sleep(0.1)
            if "dispatcher" in runtime.cells:
                evaluating = (await runtime.actor("dispatcher", Dispatcher).status()).evaluating
        (self.directory.path / "served.json").unlink()
        for name in ("engines", "learner"):
            runtime.cells[name].kill("struck")


def test_engines_that_lose_their_weights_during_the_base_evaluation_get_them_again(tmp_path: Path) -> None:
    history, ended = one_run(tmp_path / "run", WeightsVanish)
    assert (ended, history.restarts) == ("", 0)
    first, second = read_evidence(tmp_path / "run").epochs
    assert second.opened_at_s - first.opened_at_s < 60, "not only when the rollouts' timeouts have expired"
    assert verify(tmp_path / "run").problems == ()


def digests(hash_seed: int, *seeds: int) -> list[str]:
    """The histories of these seeds, one after the other in a new process: tests before this one may have left a tracer
    in ours, with which every history has more in it."""
    program = (
        "import logging, sys; logging.disable(logging.CRITICAL)\n"
        "from headrace.actors.simulation.virtual.faults import simulate_faults\n"
        "for seed in sys.argv[1:]: print(simulate_faults(int(seed)).digest)"
    )
    command = [sys.executable, "-c", program, *map(str, seeds)]
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    return told.stdout.split()


@pytest.mark.timeout(300)
def test_the_same_seed_gives_the_same_history_in_another_process() -> None:
    [expected] = digests(12345, 11)
    _, same, other = digests(1, 3, 11, 12)
    assert same == expected != other


@pytest.mark.timeout(300)
def test_the_faults_command_prints_the_report() -> None:
    logging.disable(logging.CRITICAL)
    try:
        result = CliRunner().invoke(app, ["simulate", "--faults", "11", "--json", "-"])
    finally:
        logging.disable(logging.NOTSET)
    assert result.exit_code == 0
    told = orjson.loads(result.stdout)
    assert told["clean"]
    assert told["replay"] == "headrace simulate --faults 11"
    assert told["digest"] == quietly(11).digest


def bound_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Rollouts are trained one update over the bound."""
    left = StalenessBound.updates_left
    patch.setattr(StalenessBound, "updates_left", lambda bound, *given: left(bound, *given) + 1)


def late_results_count(patch: pytest.MonkeyPatch) -> None:
    """Results of attempts that were given up are taken in."""
    judge = GroupBook._judge

    def any_attempt(book: GroupBook, rollout_id: str, attempt: int) -> ReceiptStatus:
        status = judge(book, rollout_id, attempt)
        return ReceiptStatus.ACCEPTED if status is ReceiptStatus.LATE and rollout_id in book._state.attempts else status

    patch.setattr(GroupBook, "_judge", any_attempt)


def writes_are_lost(patch: pytest.MonkeyPatch) -> None:
    """Every seventh transaction is answered and never written."""
    write, calls = Ledger.write, iter(range(1_000_000))
    patch.setattr(Ledger, "write", lambda ledger, *given: None if next(calls) % 7 == 6 else write(ledger, *given))


def nobody_reconciles(patch: pytest.MonkeyPatch) -> None:
    """What a dead dispatcher carried stays in flight for ever."""

    async def nothing(replay: Replay, carried: list, dispatcher: str) -> int:
        replay._orders.dispatcher = dispatcher
        return 0

    patch.setattr(Replay, "reconcile", nothing)


DEFECTS = [bound_off_by_one, late_results_count, writes_are_lost, nobody_reconciles]


@pytest.mark.slow(but_first=True)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda made: made.__name__)
def test_every_injected_defect_is_detected(
    monkeypatch: pytest.MonkeyPatch, defect: Callable[[pytest.MonkeyPatch], None]
) -> None:
    defect(monkeypatch)
    monkeypatch.setattr("headrace.actors.simulation.virtual.faults.PATIENCE_S", 1800.0)
    assert any(quietly(seed).problems for seed in range(12))
