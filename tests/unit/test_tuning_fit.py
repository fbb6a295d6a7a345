"""Durations from censored records: against known distributions."""

from __future__ import annotations

import random
from collections.abc import Iterable
from statistics import fmean

import numpy as np
import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.runtime.simulated.durations import Durations, DurationsConfig
from headrace.actors.simulation.tuning.duration_fit import fit
from headrace.actors.simulation.tuning.mixed_model import fit_mixed
from headrace.actors.simulation.tuning.records import LEAST_FINISHED, AttemptDuration, Recording
from headrace.actors.telemetry.slow.survival import Lognormal, SurvivalCurve

GROUP = 8
TRUTH = DurationsConfig(
    mean_s=30, median_s=25, cap_s=500, task_share=0.5, solved_shift=-0.6, stragglers=0.05, straggler_factor=4
)


def recorded(observations: Iterable[AttemptDuration]) -> Recording:
    return Recording(source="test", observations=tuple(observations))


def drawn(truth: DurationsConfig, *, tasks: int, censor_s: float, seed: int = 1) -> list[AttemptDuration]:
    """Attempts of which those that reach an exponential clock of mean `censor_s` are unfinished."""
    durations, chance = Durations(truth, seed=seed), random.Random(seed)
    observations = []
    for task in range(tasks):
        success = chance.random()
        for attempt in range(GROUP):
            solved, clock_s = chance.random() < success, chance.expovariate(1 / censor_s)
            duration_s = durations.draw_s(f"{task} {attempt}", task=str(task), solved=solved)
            ended = duration_s <= clock_s
            observations.append(
                AttemptDuration(
                    task=str(task),
                    seconds=min(duration_s, clock_s),
                    finished=ended,
                    solved=solved if ended else None,
                )
            )
    return observations


def longest_of_a_group_s(config: DurationsConfig, *, seed: int = 9) -> float:
    durations = Durations(config, seed=seed)
    return fmean(
        max(durations.draw_s(f"{task} {attempt}", task=str(task), solved=attempt % 2 == 0) for attempt in range(GROUP))
        for task in range(1500)
    )


def test_the_survival_curve_matches_a_textbook_example() -> None:
    """Remission times of 6-MP (Freireich and others, 1963; in every textbook of survival analysis)."""
    ended = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    censored = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    curve = SurvivalCurve.estimate([*ended, *censored], [True] * len(ended) + [False] * len(censored))
    assert list(curve.ended_s) == [6, 7, 10, 13, 16, 22, 23]
    assert np.allclose(curve.surviving, [0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], atol=5e-4)
    quantiles_s = curve.quantiles_s(10, Lognormal(mu=3.0, sigma=1.0))
    assert quantiles_s[:5] == (6, 7, 13, 16, 22)
    assert 23 <= quantiles_s[6] < quantiles_s[7] < quantiles_s[9]
    assert max(curve.quantiles_s(10, Lognormal(mu=3.0, sigma=1.0), cap_s=40)) == 40


def test_without_censoring_the_curve_is_the_empirical_distribution() -> None:
    curve = SurvivalCurve.estimate([3, 1, 2, 4], [True] * 4)
    assert curve.left == 0
    assert curve.quantiles_s(4, Lognormal(mu=0.0, sigma=1.0)) == (1, 2, 3, 4)
    assert [curve.rank(seconds) for seconds in (0.5, 1, 4, 9)] == [0, 0.125, 0.875, 1]


@pytest.mark.parametrize("censor_at", [None, 0.6])
def test_variances_within_and_between_tasks_are_recovered(censor_at: float | None) -> None:
    chance = random.Random(5)
    values, finished, tasks, rewards = [], [], [], []
    for task in range(400):
        common = 0.7 * chance.gauss(0, 1)
        for _ in range(6):
            reward = float(chance.random() < 0.4)
            value = 0.1 + 0.5 * (reward - 0.4) + common + 0.5 * chance.gauss(0, 1)
            is_censored = censor_at is not None and value > censor_at
            values.append(min(value, censor_at) if censor_at is not None else value)
            finished.append(not is_censored)
            tasks.append(str(task))
            rewards.append(reward)
    found = fit_mixed(values, finished, tasks, rewards)
    assert found.mean == pytest.approx(0.1, abs=0.08)
    assert found.shift == pytest.approx(0.5, abs=0.06)
    assert found.task_deviation == pytest.approx(0.7, abs=0.06)
    assert found.own_deviation == pytest.approx(0.5, abs=0.04)


def test_single_attempts_give_no_task_variance() -> None:
    found = fit_mixed([1.0, 2.0, 3.0, 4.0], [True] * 4, list("abcd"), [None] * 4)
    assert (found.task_deviation, found.shift) == (0, 0)
    assert found.mean == pytest.approx(2.5, abs=1e-3)
    assert found.own_deviation == pytest.approx(1.118, abs=0.01)


def test_censored_attempts_do_not_bias_the_mean() -> None:
    """A third is censored: the mean of finished attempts is a quarter too short, that of the fit is right."""
    observations = drawn(TRUTH, tasks=250, censor_s=80)
    assert 0.25 < fmean(not observation.finished for observation in observations) < 0.4
    found, truth_s = fit(recorded(observations)), Durations(TRUTH, seed=0).mean_s
    assert found.naive_mean_s < 0.8 * truth_s
    assert found.mean_s == pytest.approx(truth_s, rel=0.08)
    assert Durations(found.durations, seed=3).mean_s == pytest.approx(found.mean_s)
    assert found.durations.task_share == pytest.approx(0.45, abs=0.1)
    assert -0.8 < found.durations.solved_shift < -0.3


def test_the_longest_duration_of_a_group_matches_the_recording() -> None:
    """What whole groups wait for; attempts that are independent have longer maxima."""
    truth = TRUTH.model_copy(update={"task_share": 0.7, "stragglers": 0.0})
    found = fit(recorded(drawn(truth, tasks=400, censor_s=1e6))).durations
    assert longest_of_a_group_s(found) == pytest.approx(longest_of_a_group_s(truth), rel=0.08)
    alone = found.model_copy(update={"task_share": 0.0, "solved_shift": 0.0})
    assert longest_of_a_group_s(alone) > 1.15 * longest_of_a_group_s(truth)


def test_a_fit_does_not_depend_on_the_order_of_attempts() -> None:
    observations = drawn(TRUTH, tasks=20, censor_s=100)
    shuffled = random.Random(2).sample(observations, len(observations))
    assert fit(recorded(observations)) == fit(recorded(shuffled))


def test_success_rates_shrink_towards_the_mean() -> None:
    observations = [
        AttemptDuration(task=task, seconds=1.0 + number / 100, solved=task == "easy")
        for task in ("easy", "hard")
        for number in range(20)
    ]
    low, high = sorted(fit(recorded(observations)).chances)
    assert 0 < low < 0.05
    assert 0.95 < high < 1


def test_too_few_attempts_are_refused() -> None:
    observations = [
        AttemptDuration(task="t", seconds=1.0, finished=number < LEAST_FINISHED - 1) for number in range(99)
    ]
    with pytest.raises(
        ConfigError, match=rf"{LEAST_FINISHED - 1} of 99 attempts finished, but a fit needs {LEAST_FINISHED}"
    ):
        fit(recorded(observations))


@pytest.mark.parametrize("solved_share", [0.2, 0.5])
def test_tasks_and_outcomes_do_not_change_the_marginal_distribution(solved_share: float) -> None:
    plain = DurationsConfig(mean_s=30, median_s=25, cap_s=500)
    ranked = plain.model_copy(update={"task_share": 0.4, "solved_shift": 1.5, "solved_share": solved_share})
    durations, chance = Durations(ranked, seed=4), random.Random(4)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    for number in range(20_000):
        solved = chance.random() < solved_share
        times_s[solved].append(durations.draw_s(f"k{number}", task=f"t{number}", solved=solved))
    together = sorted(times_s[True] + times_s[False])
    assert fmean(together) == pytest.approx(Durations(plain, seed=0).mean_s, rel=0.02)
    assert together[10_000] == pytest.approx(25, rel=0.03)
    assert fmean(times_s[True]) > 1.5 * fmean(times_s[False])


def test_the_mean_includes_stragglers() -> None:
    config = DurationsConfig(mean_s=30, median_s=25, cap_s=120, stragglers=0.1, straggler_factor=5)
    durations = Durations(config, seed=0)
    drawn_s = [durations.draw_s(str(number)) for number in range(20_000)]
    assert fmean(drawn_s) == pytest.approx(durations.mean_s, rel=0.02)
    assert max(drawn_s) == 120
