"""How long simulated rollouts take.

Invariants:
- A draw depends on its key and the seed alone: an attempt of a rollout takes the same time
  whatever the schedule.
- `mean_s` is that of what is drawn, with the cap: an ideal computed from it is neither kinder nor harder than
  they are.
- What a task and the outcome do to a duration moves attempts within the distribution, and leaves the distribution over
  all attempts as it is.
"""

from __future__ import annotations

import math
import random
from statistics import NormalDist, fmean
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

NORMAL: Final = NormalDist()
LEAST_RANK: Final = 1e-12
"""Ranks stay this far from 0 and 1, where the normal distribution has no quantile."""


class DurationsConfig(BaseModel):
    """A lognormal distribution, or what was recorded; who is where in it, and stragglers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mean_s: float = Field(default=60.0, gt=0)
    """Mean of the lognormal distribution, before the cap."""
    median_s: float = Field(default=50.0, gt=0)
    """Its median."""
    cap_s: float = Field(default=600.0, gt=0)
    """Longer ones take this long."""
    recorded_s: tuple[float, ...] = ()
    """Durations of recorded rollouts: each is equally likely, and mean and median are not looked at. Empty draws from
    the distribution."""
    task_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the variance (of normal scores) that attempts at one task have in common: a slow task is slow in all
    its samples. 0: attempts are independent."""
    solved_shift: float = Field(default=0.0, ge=-4, le=4)
    """How much longer attempts that solve their task take, in standard deviations of the normal score; below 0: how
    much shorter."""
    solved_share: float = Field(default=0.5, ge=0, le=1)
    """Share of attempts that solve their task; only `solved_shift` looks at it."""
    stragglers: float = Field(default=0.0, ge=0, le=1)
    """Chance of an attempt to be a straggler, whatever its task."""
    straggler_factor: float = Field(default=4.0, ge=1)
    """How many times as long a straggler takes; the cap holds for it too."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.recorded_s and self.mean_s < self.median_s:
            raise ValueError(f"mean_s {self.mean_s:g} is below median_s {self.median_s:g}: no lognormal is like that")
        if any(not 0 <= duration_s < math.inf for duration_s in self.recorded_s):
            raise ValueError("recorded_s holds a duration that is no number from 0 on; take it out")
        return self


class Durations:
    """Draws from a `DurationsConfig`."""

    def __init__(self, config: DurationsConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._mu = math.log(config.median_s)
        self._sigma = math.sqrt(max(0.0, 2 * math.log(config.mean_s / config.median_s)))
        self._recorded_s = sorted(config.recorded_s)
        self._is_ranked = bool(config.task_share or config.solved_shift)

    def draw_s(self, key: str, *, task: str = "", solved: bool = False) -> float:
        """The duration of this key, which is one of the task's attempts."""
        chance = random.Random(f"duration {self._seed} {key}")
        if self._is_ranked:
            duration_s = self._quantile_s(self._rank(chance, task, solved=solved))
        elif self._recorded_s:
            duration_s = chance.choice(self._config.recorded_s)
        else:
            duration_s = chance.lognormvariate(self._mu, self._sigma)
        if self._config.stragglers and chance.random() < self._config.stragglers:
            duration_s *= self._config.straggler_factor
        return min(self._config.cap_s, duration_s)

    @property
    def mean_s(self) -> float:
        """Of what is drawn: E[min(X, cap)]."""
        share, factor = self._config.stragglers, self._config.straggler_factor
        return (1 - share) * self._mean_s(1.0) + (share * self._mean_s(factor) if share else 0.0)

    def _mean_s(self, factor: float) -> float:
        """E[min(factor * X, cap)]."""
        config = self._config
        if config.recorded_s:
            return fmean(min(config.cap_s, factor * duration_s) for duration_s in config.recorded_s)
        if not self._sigma:
            return min(config.cap_s, factor * config.median_s)
        cap = (math.log(config.cap_s / factor) - self._mu) / self._sigma
        return factor * config.mean_s * NORMAL.cdf(cap - self._sigma) + config.cap_s * (1 - NORMAL.cdf(cap))

    def _rank(self, chance: random.Random, task: str, *, solved: bool) -> float:
        """Where the attempt is among all attempts, from 0 (shortest) to 1: uniform over them."""
        config = self._config
        common = random.Random(f"task duration {self._seed} {task}").gauss(0.0, 1.0)
        own = chance.gauss(0.0, 1.0)
        shift, share = config.solved_shift, config.solved_share
        shifts = {True: shift * (1 - share), False: -shift * share}
        score = math.sqrt(config.task_share) * common + math.sqrt(1 - config.task_share) * own + shifts[solved]
        return share * NORMAL.cdf(score - shifts[True]) + (1 - share) * NORMAL.cdf(score - shifts[False])

    def _quantile_s(self, rank: float) -> float:
        if self._recorded_s:
            return self._recorded_s[min(len(self._recorded_s) - 1, int(rank * len(self._recorded_s)))]
        score = NORMAL.inv_cdf(min(1 - LEAST_RANK, max(LEAST_RANK, rank)))
        return math.exp(self._mu + self._sigma * score)
