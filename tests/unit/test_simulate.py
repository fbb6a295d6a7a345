"""`headrace simulate`: the ordinary actors in virtual time, and what their ledger shows. Most plans here are a quarter
of the preset: 16 rollouts a batch; the preset itself runs with `slow`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from headrace.actors.cli import app as cli
from headrace.actors.errors import ConfigError, RunStalled
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.simulation.virtual import simulate as simulate_module
from headrace.actors.simulation.virtual.plan import PRESETS, Mode, SimulationPlan, make_plan
from headrace.actors.simulation.virtual.run_statistics import RunStatistics, history_digest, read_statistics
from headrace.actors.simulation.virtual.simulate import run_plan, simulate
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.batches import BatchBook
from headrace.buffer.core.records import AttemptRecord
from headrace.buffer.core.staleness import StalenessBound
from headrace.policies.learners.simulated import PushMode


def quarter(**changes: Any) -> SimulationPlan:
    """The preset with a quarter of its batch, groups and slots: the same ideal."""
    sizes = {"batch_size": 16, "group_size": 4, "slots": 16, "tasks": 64, "turns": 2, "steps": 24}
    return make_plan("swe64", sizes | changes)


def account(**changes: Any) -> RunStatistics:
    return run_plan(quarter(**changes))[0]


@pytest.fixture(scope="module")
def asynchronous() -> RunStatistics:
    return account()


@pytest.fixture(scope="module")
def synchronous() -> RunStatistics:
    return account(mode=Mode.SYNC)


def test_the_preset_matches_the_published_figures() -> None:
    plan = PRESETS["swe64"]
    assert (plan.batch_size, plan.group_size, plan.learner_s, plan.push_s) == (64, 8, 240, 10)
    assert plan.ideal_s / 60 == pytest.approx(9.9, abs=0.05)
    assert plan.model_copy(update={"slots": 160}).ideal_s / 60 == 4.0


def test_async_mode_is_close_to_the_ideal_and_within_the_staleness_bound(asynchronous: RunStatistics) -> None:
    assert not asynchronous.problems
    assert 0 < asynchronous.max_staleness <= 4
    assert asynchronous.trained == sum(asynchronous.staleness.values()) == 24 * 16
    # So few rollouts are not of the mean; no slot was idle, and nothing ran for nothing.
    assert 0.85 < quarter().ideal_s / asynchronous.step_s < 1.15
    assert 0.99 < asynchronous.busy["agent"] / 16 <= 1
    assert (asynchronous.waste, asynchronous.most_in_flight) == (0, 16)
    assert asynchronous.learner_share == pytest.approx(240 / asynchronous.step_s)


def test_long_rollouts_are_trained_as_often_as_short_ones(asynchronous: RunStatistics) -> None:
    assert [decile.decile for decile in asynchronous.deciles] == list(range(1, 11))
    assert asynchronous.trained_shares() == [1.0] * 10
    assert sum(decile.trained for decile in asynchronous.deciles) == asynchronous.trained


@pytest.mark.whole
def test_a_rule_that_aborts_trains_fewer_long_rollouts() -> None:
    """`finished` alone would hide it: what was cancelled has no end."""
    aborted = account(rule="fraction(0.75)", buffer={"unfinished": "abort"})
    shortest, *_, longest = aborted.trained_shares()
    assert shortest is not None
    assert longest is not None
    assert shortest > 0.9
    assert longest < 0.7


@pytest.mark.whole
def test_sync_one_step_off_and_async_modes_differ_in_speed_and_staleness(
    asynchronous: RunStatistics, synchronous: RunStatistics
) -> None:
    one_step_off = account(mode=Mode.ONE_STEP_OFF)
    assert synchronous.max_staleness == 0
    assert one_step_off.max_staleness == 1
    # Sync waits for the slowest rollout, then the learner, then the push; one step off for the slower of the first two.
    assert synchronous.step_s - one_step_off.step_s == pytest.approx(240 + 10, rel=0.15)
    assert synchronous.step_s > 2 * asynchronous.step_s
    assert not (*synchronous.problems, *one_step_off.problems)


@pytest.mark.whole
def test_a_pausing_push_costs_little_and_a_draining_push_costs_more(asynchronous: RunStatistics) -> None:
    pause = account(push=PushMode.PAUSE, push_s=60.0)
    drain = account(push=PushMode.DRAIN, steps=12)
    assert 1.02 < pause.step_s / asynchronous.step_s < 1.3
    assert drain.step_s > 1.5 * asynchronous.step_s
    assert not (*pause.problems, *drain.problems)


@pytest.mark.whole
def test_a_slow_learner_determines_the_ideal_and_the_inventory() -> None:
    slow = account(learner_s=1800.0, max_staleness=2, steps=12)
    assert slow.step_s == pytest.approx(1800, rel=0.01)
    assert slow.learner_share == pytest.approx(1.0, abs=0.01)
    assert slow.max_staleness <= 2
    assert slow.busy["agent"] < 16


def without_random_names(attempt: AttemptRecord) -> AttemptRecord:
    assert attempt.breakdown is not None or attempt.ended_at_s is None
    if attempt.breakdown is None:
        return attempt
    labels = {name: value for name, value in attempt.breakdown.labels.items() if name not in ("worker", "sandbox")}
    return replace(attempt, breakdown=replace(attempt.breakdown, labels=labels))


def test_the_same_seed_gives_the_same_ledger(tmp_path: Path) -> None:
    plans = [quarter(steps=8), quarter(steps=8), quarter(steps=8, seed=1)]
    digests = []
    for number, plan in enumerate(plans):
        run_plan(plan, tmp_path / str(number))
        digests.append(history_digest(tmp_path / str(number)))
    assert digests[0] == digests[1] != digests[2]
    first, second = (read_evidence(tmp_path / name) for name in "01")
    assert (first.batches, first.commits) == (second.batches, second.commits)
    assert list(map(without_random_names, first.attempts)) == list(map(without_random_names, second.attempts))
    assert verify(tmp_path / "0").clean


def test_an_attempts_duration_does_not_depend_on_the_schedule(tmp_path: Path) -> None:
    agent_s: list[dict[tuple[str, int], float]] = []
    for number, mode in enumerate((Mode.ASYNC, Mode.SYNC)):
        run_plan(quarter(steps=4, mode=mode), tmp_path / str(number))
        attempts = read_evidence(tmp_path / str(number)).attempts
        agent_s.append(
            {attempt.key: dict(attempt.phases_s).get("agent", 0.0) for attempt in attempts if attempt.phases_s}
        )
    both = agent_s[0].keys() & agent_s[1].keys()
    assert len(both) > 32
    assert [agent_s[0][key] for key in both] == pytest.approx([agent_s[1][key] for key in both])


class LooseBook(BatchBook):
    """A `take` that is off by one."""

    def take(self, *arguments: Any) -> Any:
        self._bound = StalenessBound(self._config.max_staleness + 1)
        return super().take(*arguments)


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["headrace", "simulate", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


SMALL = ("--steps", "10", *(f"--set={key}" for key in ("batch_size=16", "group_size=4", "tasks=64", "turns=2")))
CROWDED = (*SMALL, "--slots", "40", "--max-staleness", "2", "--json", "-")


@pytest.mark.whole
def test_a_staleness_bound_that_is_off_by_one_is_detected(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert run_command(monkeypatch, *CROWDED) == 0
    sound = orjson.loads(capfdbinary.readouterr().out)
    assert len(sound["trained_share_by_decile"]) == 10
    assert (sound["max_staleness_seen"], sound["clean"], sound["problems"]) == (2, True, [])
    monkeypatch.setattr("headrace.buffer.core.replay.BatchBook", LooseBook)
    assert run_command(monkeypatch, *CROWDED) == cli.EXIT_DIRTY
    broken = orjson.loads(capfdbinary.readouterr().out)
    assert (broken["max_staleness_seen"], broken["clean"]) == (3, False)
    assert broken["problems"][0] == "trained at staleness 3, but the bound is 2"


def test_the_command_prints_lines_and_keeps_the_ledger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_command(monkeypatch, *SMALL, "--slots", "16", "--keep", str(tmp_path / "kept")) == 0
    said = capsys.readouterr().err
    assert "minutes a step" in said
    assert "shortest first  100%  100%" in said
    assert "ledger clean" in said
    assert verify(tmp_path / "kept").clean
    assert read_statistics(tmp_path / "kept", warmup_steps=5).trained == 160
    assert run_command(monkeypatch, *SMALL, "--keep", str(tmp_path / "kept")) == cli.EXIT_BAD_INPUT
    assert "--keep" in capsys.readouterr().err


REFUSED = [
    (("--preset", "swe65"), "--preset swe65: unknown preset; choose one of: swe64"),
    (("--max-staleness", "0"), 'needs mode = "sync"'),
    (("--slots", "0"), "slots"),
    (("--steps", "0"), "steps"),
    (("--mode", "fast"), "'async', 'one-step-off' or 'sync'"),
    (("--push", "fast"), "'overlap', 'pause' or 'drain'"),
    (("--accept", "count(9)"), "count(9) can never be met"),
    (("--accept", "nothing"), "rule"),
    (("--set", "nope=1"), "unknown key nope"),
    (("--set", "durations.mean_s=1"), "must be at least median_s"),
    (("--set", "buffer.batch_sizes=1"), "unknown key batch_sizes"),
    (("--set", "slots.many=1"), "slots is a value"),
    (("--set", "slots"), "write key=value"),
]


@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=[" ".join(arguments) for arguments, _ in REFUSED])
def test_bad_input_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    assert run_command(monkeypatch, *arguments) == cli.EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_values_of_other_keys_are_parsed_as_toml() -> None:
    plan = make_plan("swe64", {}, ["durations.recorded_s=[1.0, 2.0]", 'buffer={ zero_variance = "filter" }'])
    assert plan.mean_s == 1.5
    assert plan.buffer_config().zero_variance == "filter"
    with pytest.raises(ConfigError, match="remove it"):
        make_plan("swe64", {}, ["durations.recorded_s=[-1.0]"])


@pytest.mark.whole
def test_a_run_without_progress_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are always filtered fill no batch."""
    monkeypatch.setattr(BatchBook, "take", lambda *_: None)
    short = DurationsConfig(mean_s=5.0, median_s=4.0, cap_s=10.0)  # the limit follows from the longest rollout
    with pytest.raises(RunStalled, match="no progress for"):
        run_plan(quarter(steps=2, durations=short, learner_s=1.0))


def test_a_plan_whose_data_runs_out_before_the_measurement_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"after 2 of 24 steps, of which 12 are the warm-up: raise tasks"):
        run_plan(quarter(tasks=8, buffer={"passes": 1}))


def test_sync_mode_can_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[SimulationPlan] = []
    real = run_plan

    def watched(plan: SimulationPlan, keep: Path | None = None) -> tuple[RunStatistics, float]:
        ran.append(plan)
        return real(plan, keep)

    monkeypatch.setattr(simulate_module, "run_plan", watched)
    result = simulate(quarter(steps=4))
    assert [plan.mode for plan in ran] == [Mode.ASYNC, Mode.SYNC]
    assert result.to_json()["speedup_over_sync"] == pytest.approx(result.sync_step_s / result.account.step_s)
    stations = result.utilisation()
    assert stations["engine"] == pytest.approx(0.5 * stations["agent"], rel=0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("slots", "bound", "fraction", "speedup"), [(64, 4, 0.97, 3.0), (160, 8, 0.95, 7.0)])
def test_the_swe64_preset_reaches_its_published_figures(
    slots: int, bound: int, fraction: float, speedup: float
) -> None:
    said = simulate(make_plan("swe64", {"slots": slots, "max_staleness": bound})).to_json()
    assert said["clean"]
    assert said["fraction_of_ideal"] >= fraction
    assert said["speedup_over_sync"] >= speedup
    assert said["max_staleness_seen"] <= bound


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_rollouts_can_be_in_flight() -> None:
    many = run_plan(make_plan("swe64", {"slots": 10_000, "steps": 2}, ["batch_size=4096", "turns=2"]))[0]
    assert many.most_in_flight == 10_000
    assert not many.problems
