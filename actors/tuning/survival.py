"""The distribution of durations some of which were only seen to exceed a time (right-censored).

Invariants:
- A censored duration counts as at risk up to its time, and never as ended: leaving it out, or taking its time for its
  duration, would make stragglers vanish.
- Up to the last duration that ended the curve is Kaplan's and Meier's and assumes no shape; beyond it nothing was seen,
  and the tail is that of a lognormal fitted to all.

E. L. Kaplan and P. Meier, J. Am. Stat. Assoc. 53 (1958), p. 457. numpy alone: no statistics package is a dependency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, Self

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NORMAL: Final = NormalDist()
LEAST_S: Final = 1e-6
"""Shorter durations count as this long: they have no logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Mean and standard deviation of the logarithm of seconds."""

    mu: float
    sigma: float

    def share_within(self, seconds: float) -> float:
        """P(X <= seconds)."""
        return NORMAL.cdf((math.log(max(seconds, LEAST_S)) - self.mu) / self.sigma)

    def quantile_s(self, rank: float) -> float:
        return math.exp(self.mu + self.sigma * NORMAL.inv_cdf(min(1 - 1e-12, max(1e-12, rank))))


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalCurve:
    """`ended_s` are the distinct durations that ended, ascending; `surviving` is the share that takes longer than each
    of them."""

    ended_s: NDArray[np.float64]
    surviving: NDArray[np.float64]

    @classmethod
    def estimate(cls, seconds: Sequence[float], finished: Sequence[bool]) -> Self:
        """ValueError without a finished one."""
        times, ended = np.asarray(seconds, dtype=np.float64), np.asarray(finished, dtype=np.bool_)
        if not ended.any():
            raise ValueError("nothing ended: there is no curve")
        distinct, deaths = np.unique(times[ended], return_counts=True)
        # What is censored at the moment of an end was still at risk then.
        at_risk = len(times) - np.searchsorted(np.sort(times), distinct, side="left")
        return cls(ended_s=distinct, surviving=np.cumprod(1 - deaths / at_risk).astype(np.float64))

    @property
    def left(self) -> float:
        """Share that takes longer than anything that ended."""
        return float(self.surviving[-1])

    def rank(self, seconds: float) -> float:
        """Share of shorter durations, those of the same length by half."""
        before = self._share_below(int(np.searchsorted(self.ended_s, seconds, side="left")))
        upto = self._share_below(int(np.searchsorted(self.ended_s, seconds, side="right")))
        return (before + upto) / 2

    def quantiles_s(self, count: int, tail: Lognormal, cap_s: float = math.inf) -> tuple[float, ...]:
        """So many durations, each equally likely, ascending; none above the cap."""
        return tuple(min(cap_s, self._quantile_s((number + 0.5) / count, tail)) for number in range(count))

    def _share_below(self, events: int) -> float:
        return 0.0 if events == 0 else 1.0 - float(self.surviving[events - 1])

    def _quantile_s(self, rank: float, tail: Lognormal) -> float:
        if rank <= 1 - self.left + 1e-12:
            place = int(np.searchsorted(1 - self.surviving, rank - 1e-12, side="left"))
            return float(self.ended_s[min(place, len(self.ended_s) - 1)])
        last_s = float(self.ended_s[-1])
        known = tail.share_within(last_s)
        beyond = (rank - (1 - self.left)) / self.left
        return max(last_s, tail.quantile_s(known + (1 - known) * beyond))
