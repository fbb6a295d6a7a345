"""Survival curves: distributions of durations of which some have not ended.

Invariant: a censored duration is at risk up to its observed time and is not counted as finished. Dropping it, or using
that time as its duration, would hide stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

NORMAL: Final = NormalDist()
LEAST_S: Final = 1e-6
"""Lower bound on durations, so that all of them have a logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lognormal distribution of seconds: mean and standard deviation of the logarithm."""

    mu: float
    sigma: float

    def share_within(self, seconds: float) -> float:
        """Return P(X <= seconds)."""
        return NORMAL.cdf((math.log(max(seconds, LEAST_S)) - self.mu) / self.sigma)

    def quantile_s(self, rank: float) -> float:
        return math.exp(self.mu + self.sigma * NORMAL.inv_cdf(min(1 - 1e-12, max(1e-12, rank))))


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalCurve:
    """Survival curve. `ended_s` are the distinct finished durations, ascending; `surviving` has the share of attempts
    that take longer than each of these durations."""

    ended_s: NDArray[np.float64]
    surviving: NDArray[np.float64]

    @classmethod
    def estimate(cls, seconds: Sequence[float], finished: Sequence[bool]) -> Self:
        """Estimate the curve. Raises ValueError without a finished duration."""
        times, ended = np.asarray(seconds, dtype=np.float64), np.asarray(finished, dtype=np.bool_)
        if not ended.any():
            raise ValueError("no attempt has finished; fitting the curve needs at least one")
        distinct, deaths = np.unique(times[ended], return_counts=True)
        # Durations censored at the time of an end were still at risk.
        at_risk = len(times) - np.searchsorted(np.sort(times), distinct, side="left")
        return cls(ended_s=distinct, surviving=np.cumprod(1 - deaths / at_risk).astype(np.float64))

    @property
    def left(self) -> float:
        """Share of attempts that take longer than the longest finished one."""
        return float(self.surviving[-1])

    def rank(self, seconds: float) -> float:
        """Return the share of shorter durations, where equal durations count half."""
        before = self._share_below(int(np.searchsorted(self.ended_s, seconds, side="left")))
        upto = self._share_below(int(np.searchsorted(self.ended_s, seconds, side="right")))
        return (before + upto) / 2

    def quantiles_s(self, count: int, tail: Lognormal, cap_s: float = math.inf) -> tuple[float, ...]:
        """Return `count` equally likely durations, ascending and at most `cap_s`."""
        quantiles_s = []
        last_s = float(self.ended_s[-1])
        known = tail.share_within(last_s)
        for number in range(count):
            rank = (number + 0.5) / count
            if rank <= 1 - self.left + 1e-12:
                place = int(np.searchsorted(1 - self.surviving, rank - 1e-12, side="left"))
                quantiles_s.append(float(self.ended_s[min(place, len(self.ended_s) - 1)]))
            else:
                beyond = (rank - (1 - self.left)) / self.left
                quantiles_s.append(max(last_s, tail.quantile_s(known + (1 - known) * beyond)))
        return tuple(min(cap_s, value) for value in quantiles_s)

    def quantile_s(self, rank: float) -> float:
        """Return the duration below which this share of attempts ends; infinite if too few have ended to say so."""
        place = int(np.searchsorted(1 - self.surviving, rank - 1e-12, side="left"))
        return math.inf if place >= len(self.ended_s) else float(self.ended_s[place])

    def _share_below(self, events: int) -> float:
        return 0.0 if events == 0 else 1.0 - float(self.surviving[events - 1])
