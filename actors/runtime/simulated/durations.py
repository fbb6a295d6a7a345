"""Durations of simulated rollouts, drawn from a lognormal distribution or from recorded durations.

Invariants:
- A draw depends only on its key and the seed: an attempt of a rollout takes the same time under any schedule.
- `mean_s` is the mean of the capped draws, so that an ideal step time computed from it is exact.
- Task and outcome move an attempt within the distribution and leave the distribution over all attempts unchanged.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean
from typing import Final, Self

from pydantic import Field, model_validator

from headrace.buffer.primitives.sections import Section

NORMAL: Final = NormalDist()
LEAST_RANK: Final = 1e-12
"""Ranks stay this far from 0 and 1, where the normal distribution has no quantile."""


class DurationsConfig(Section):
    """Distribution of durations (lognormal or recorded), its dependence on task and outcome, and stragglers."""

    mean_s: float = Field(default=60.0, gt=0)
    """Mean of the lognormal distribution, before the cap."""
    median_s: float = Field(default=50.0, gt=0)
    """Median of the lognormal distribution."""
    cap_s: float = Field(default=600.0, gt=0)
    """Upper bound of a duration; longer draws are clipped to it."""
    recorded_s: tuple[float, ...] = ()
    """Durations of recorded rollouts, each equally likely; mean and median are then ignored. Empty: draw from the
    lognormal distribution."""
    task_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the variance (of normal scores) that attempts at one task have in common: a slow task is slow in all
    its samples. 0: attempts are independent."""
    solved_shift: float = Field(default=0.0, ge=-4, le=4)
    """Additional duration of attempts that solve their task, in standard deviations of the normal score; negative if
    they are shorter."""
    solved_share: float = Field(default=0.5, ge=0, le=1)
    """Share of attempts that solve their task; used only by `solved_shift`."""
    stragglers: float = Field(default=0.0, ge=0, le=1)
    """Probability that an attempt is a straggler, independent of its task."""
    straggler_factor: float = Field(default=4.0, ge=1)
    """Factor by which a straggler's duration is multiplied; the cap still applies."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.recorded_s and self.mean_s < self.median_s:
            raise ValueError(
                f"mean_s ({self.mean_s:g}) must be at least median_s ({self.median_s:g}): a lognormal's mean is never "
                "below its median"
            )
        if any(not 0 <= duration_s < math.inf for duration_s in self.recorded_s):
            raise ValueError("recorded_s contains a negative or infinite duration; remove it")
        return self


class Durations:
    """Generator of durations from a `DurationsConfig`."""

    def __init__(self, config: DurationsConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._mu = math.log(config.median_s)
        self._sigma = math.sqrt(max(0.0, 2 * math.log(config.mean_s / config.median_s)))
        self._recorded_s = sorted(config.recorded_s)
        self._is_ranked = bool(config.task_share or config.solved_shift)

    def draw_s(self, key: str, *, task: str = "", solved: bool = False) -> float:
        """Return the duration of `key`, one of the attempts at the task."""
        chance = random.Random(f"duration {self._seed} {key}")
        if self._is_ranked:
            rank = self._rank(chance, task, solved=solved)
            if self._recorded_s:
                duration_s = self._recorded_s[min(len(self._recorded_s) - 1, int(rank * len(self._recorded_s)))]
            else:
                score = NORMAL.inv_cdf(min(1 - LEAST_RANK, max(LEAST_RANK, rank)))
                duration_s = math.exp(self._mu + self._sigma * score)
        elif self._recorded_s:
            duration_s = chance.choice(self._config.recorded_s)
        else:
            duration_s = chance.lognormvariate(self._mu, self._sigma)
        if self._config.stragglers and chance.random() < self._config.stragglers:
            duration_s *= self._config.straggler_factor
        return min(self._config.cap_s, duration_s)

    @property
    def mean_s(self) -> float:
        """Mean of the capped durations, E[min(X, cap)]."""
        share, factor = self._config.stragglers, self._config.straggler_factor
        return (1 - share) * self._mean_s(1.0) + (share * self._mean_s(factor) if share else 0.0)

    def _mean_s(self, factor: float) -> float:
        """Return E[min(factor * X, cap)]."""
        config = self._config
        if config.recorded_s:
            return fmean(min(config.cap_s, factor * duration_s) for duration_s in config.recorded_s)
        if not self._sigma:
            return min(config.cap_s, factor * config.median_s)
        cap = (math.log(config.cap_s / factor) - self._mu) / self._sigma
        return factor * config.mean_s * NORMAL.cdf(cap - self._sigma) + config.cap_s * (1 - NORMAL.cdf(cap))

    def _rank(self, chance: random.Random, task: str, *, solved: bool) -> float:
        """Return the rank of the attempt among all attempts, from 0 (shortest) to 1, uniformly distributed."""
        config = self._config
        common = random.Random(f"task duration {self._seed} {task}").gauss(0.0, 1.0)
        own = chance.gauss(0.0, 1.0)
        shift, share = config.solved_shift, config.solved_share
        shifts = {True: shift * (1 - share), False: -shift * share}
        score = math.sqrt(config.task_share) * common + math.sqrt(1 - config.task_share) * own + shifts[solved]
        return share * NORMAL.cdf(score - shifts[True]) + (1 - share) * NORMAL.cdf(score - shifts[False])
