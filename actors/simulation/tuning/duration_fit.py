"""The fit of simulated durations to recorded ones.

The distribution over all attempts is the Kaplan-Meier curve (without an assumed shape, since stragglers give two modes,
unlike a lognormal), with the tail of a censored lognormal beyond the longest finished attempt. The rank of an attempt
depends on its task and on success through a normal copula: each duration becomes the normal score of its rank, and
`mixed_model` splits the scores into a part that attempts at one task share, a part that depends on success, and the
rest. Otherwise the longest duration of a group, which whole groups wait for, would be overestimated: eight attempts at
one task are more alike than eight random ones.

Invariants:
- A fit depends only on the observations, not on their order.
- Attempts that have not ended are censored (`slowness.survival`).
- Up to the longest finished duration the curve is the Kaplan-Meier estimate, without an assumed shape; beyond it there
  is no data, and the tail is that of a lognormal fitted to all durations.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Final

from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.simulation.tuning.mixed_model import MixedFit, fit_mixed
from headrace.actors.simulation.tuning.records import AttemptDuration, Recording, refuse_thin
from headrace.actors.telemetry.slow.survival import LEAST_S, NORMAL, Lognormal, SurvivalCurve

QUANTILES: Final = 1000
"""Number of durations that represent the curve."""
LARGEST_SHIFT: Final = 3.0
"""Largest shift between failed and solved attempts, in standard deviations; a larger one would mean that the duration
determines success."""
LARGEST_SHARE: Final = 0.98
PRIOR: Final = 1.0
"""Number of pseudo-attempts per task with the mean success rate, since solving two of two does not prove certainty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted durations and statistics of their recording. `chances` are success rates by task. `beyond` is the share of
    attempts that take longer than any finished one; their durations follow the lognormal."""

    durations: DurationsConfig
    lognormal: Lognormal
    chances: tuple[float, ...]
    finished: int
    unfinished: int
    tasks: int
    beyond: float
    mean_s: float
    naive_mean_s: float
    """Mean duration of finished attempts only, for comparison."""

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
    """Fit durations to a recording. Raises ConfigError if too few attempts finished."""
    refuse_thin(recording)
    observations = sorted(
        recording.observations, key=lambda one: (one.task, one.seconds, one.finished, bool(one.solved))
    )
    seconds = [max(LEAST_S, observation.seconds) for observation in observations]
    finished = [observation.finished for observation in observations]
    curve = SurvivalCurve.estimate(seconds, finished)
    of_logarithms = _mixed([math.log(value) for value in seconds], observations)
    lognormal = Lognormal(mu=of_logarithms.mean, sigma=of_logarithms.deviation)
    quantiles_s = curve.quantiles_s(QUANTILES, lognormal, recording.cap_s)
    # Normal scores of the ranks; both ends are cut, where scores would be infinite.
    ranks = [min(1 - 1e-4, max(1e-4, curve.rank(value))) for value in seconds]
    scores = _mixed([NORMAL.inv_cdf(rank) for rank in ranks], observations)
    # The shift relative to attempts with the same result.
    shift = scores.shift / math.hypot(scores.task_deviation, scores.own_deviation)
    durations = DurationsConfig(
        recorded_s=quantiles_s,
        cap_s=max(quantiles_s),
        task_share=min(LARGEST_SHARE, round(scores.task_share, 4)),
        solved_shift=round(min(LARGEST_SHIFT, max(-LARGEST_SHIFT, shift)), 4),
        solved_share=_solved_share(observations),
    )
    # Success rates of tasks with results; a single 0.5 if there are none.
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    for observation in observations:
        if (solved := _solved(observation)) is not None:
            by_task[observation.task].append(solved)
    mean = _solved_share(observations)
    chances = [(sum(solved) + PRIOR * mean) / (len(solved) + PRIOR) for solved in by_task.values()]
    return Fit(
        durations=durations,
        lognormal=lognormal,
        chances=tuple(round(chance, 4) for chance in chances) or (0.5,),
        finished=sum(finished),
        unfinished=len(finished) - sum(finished),
        tasks=len({observation.task for observation in observations}),
        beyond=curve.left,
        mean_s=fmean(quantiles_s),
        naive_mean_s=fmean(value for value, ended in zip(seconds, finished, strict=True) if ended),
    )


def _mixed(values: Sequence[float], observations: Sequence[AttemptDuration]) -> MixedFit:
    return fit_mixed(
        values,
        [observation.finished for observation in observations],
        [observation.task for observation in observations],
        [_solved(observation) for observation in observations],
    )


def _solved(observation: AttemptDuration) -> float | None:
    """Return 1 or 0, like the simulated evaluator's rewards, or None if unknown."""
    return None if observation.solved is None else float(observation.solved)


def _solved_share(observations: Sequence[AttemptDuration]) -> float:
    known = [solved for solved in map(_solved, observations) if solved is not None]
    return round(fmean(known), 4) if known else 0.5
