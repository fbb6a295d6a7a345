"""From what was recorded to the durations of a simulation.

The distribution over all attempts is the Kaplan-Meier curve (no shape is assumed: stragglers make two humps, which no
lognormal has), with the tail of a censored lognormal beyond what ended. Where an attempt is in it depends on its task
and on whether it solved it by a normal copula: each duration becomes the normal score of its rank, and `mixed` splits
the scores into what attempts at one task have in common, what goes with solving it, and the rest. Without that, the
longest of a group, which whole groups wait for, would come out too long: eight attempts at one task are more alike than
any eight.

Invariant: a fit depends on the observations alone, in whatever order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from headrace.actors.simulated.durations import DurationsConfig
from headrace.actors.tuning.mixed_model import fit_mixed
from headrace.actors.tuning.records import refuse_thin
from headrace.actors.tuning.survival import LEAST_S, NORMAL, Lognormal, SurvivalCurve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.actors.tuning.mixed_model import MixedFit
    from headrace.actors.tuning.records import Observation, Recording

QUANTILES: Final = 1000
"""Durations that stand for the curve."""
LARGEST_SHIFT: Final = 3.0
"""Standard deviations; more would mean that the duration tells whether the task is solved."""
LARGEST_SHARE: Final = 0.98
PRIOR: Final = 1.0
"""Attempts at each task that are added with the mean chance: two of two solved is no proof of certainty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Durations to draw from, and what they rest on. `chances` are the tasks' chances of success. `beyond` is the share
    of attempts that takes longer than anything that ended: their durations are the lognormal's."""

    durations: DurationsConfig
    lognormal: Lognormal
    chances: tuple[float, ...]
    finished: int
    unfinished: int
    tasks: int
    beyond: float
    mean_s: float
    naive_mean_s: float
    """Of those that ended: what one gets by dropping the others."""

    def to_json(self) -> dict[str, Any]:
        recorded_s = self.durations.recorded_s
        return {
            "finished": self.finished,
            "unfinished": self.unfinished,
            "tasks": self.tasks,
            "mean_s": self.mean_s,
            "mean_of_finished_s": self.naive_mean_s,
            "deciles_s": [recorded_s[len(recorded_s) * tenth // 10] for tenth in range(1, 10)],
            "longest_s": recorded_s[-1],
            "beyond": self.beyond,
            "task_share": self.durations.task_share,
            "solved_shift": self.durations.solved_shift,
            "mean_chance": fmean(self.chances),
            "lognormal_median_s": math.exp(self.lognormal.mu),
            "lognormal_sigma": self.lognormal.sigma,
        }

    def quantile_s(self, rank: float) -> float:
        return self.durations.recorded_s[min(QUANTILES - 1, int(rank * QUANTILES))]


def fit(recording: Recording) -> Fit:
    """Raises ConfigError when too few attempts ended."""
    refuse_thin(recording)
    observations = sorted(recording.observations, key=_order)
    seconds = [max(LEAST_S, observation.seconds) for observation in observations]
    finished = [observation.finished for observation in observations]
    curve = SurvivalCurve.estimate(seconds, finished)
    of_logarithms = _mixed([math.log(value) for value in seconds], observations)
    lognormal = Lognormal(mu=of_logarithms.mean, sigma=of_logarithms.deviation)
    quantiles_s = curve.quantiles_s(QUANTILES, lognormal, recording.cap_s)
    scores = _mixed([_score(curve, value) for value in seconds], observations)
    durations = DurationsConfig(
        recorded_s=quantiles_s,
        cap_s=max(quantiles_s),
        task_share=min(LARGEST_SHARE, round(scores.task_share, 4)),
        solved_shift=_shift(scores),
        solved_share=_solved_share(observations),
    )
    return Fit(
        durations=durations,
        lognormal=lognormal,
        chances=_chances(observations),
        finished=sum(finished),
        unfinished=len(finished) - sum(finished),
        tasks=len({observation.task for observation in observations}),
        beyond=curve.left,
        mean_s=fmean(quantiles_s),
        naive_mean_s=fmean(value for value, ended in zip(seconds, finished, strict=True) if ended),
    )


def _order(observation: Observation) -> tuple[str, float, bool, bool]:
    return (observation.task, observation.seconds, observation.finished, bool(observation.solved))


def _mixed(values: Sequence[float], observations: Sequence[Observation]) -> MixedFit:
    return fit_mixed(
        values,
        [observation.finished for observation in observations],
        [observation.task for observation in observations],
        [_solved(observation) for observation in observations],
    )


def _solved(observation: Observation) -> float | None:
    """As the simulated evaluator's rewards: 1 or 0."""
    return None if observation.solved is None else float(observation.solved)


def _score(curve: SurvivalCurve, seconds: float) -> float:
    """Of the normal distribution, at the rank."""
    return NORMAL.inv_cdf(min(1 - 1e-4, max(1e-4, curve.rank(seconds))))


def _shift(scores: MixedFit) -> float:
    """In standard deviations of attempts that are alike in whether they solved their task."""
    alike = math.hypot(scores.task_deviation, scores.own_deviation)
    return round(min(LARGEST_SHIFT, max(-LARGEST_SHIFT, scores.shift / alike)), 4)


def _solved_share(observations: Sequence[Observation]) -> float:
    known = [solved for solved in map(_solved, observations) if solved is not None]
    return round(fmean(known), 4) if known else 0.5


def _chances(observations: Sequence[Observation]) -> tuple[float, ...]:
    """Of each task with a result; 0.5 where nothing was decided."""
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    for observation in observations:
        if (solved := _solved(observation)) is not None:
            by_task[observation.task].append(solved)
    mean = _solved_share(observations)
    chances = [(sum(solved) + PRIOR * mean) / (len(solved) + PRIOR) for solved in by_task.values()]
    return tuple(round(chance, 4) for chance in chances) or (0.5,)
