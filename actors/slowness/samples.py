"""Quantiles of samples without one of their own members: what is typical of a rollout does not depend on it.

Invariant: a quantile without a member equals the quantile of the sample from which it was removed; the members are
removed all at once, since removing them one by one takes seconds in a long run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]
    Places = NDArray[np.int64]


class Sample:
    """Durations, of shape (n,), of which some have not ended. With all of them ended a quantile is interpolated; else
    it is that of the survival curve (`survival.SurvivalCurve`), infinite if too few have ended to say it."""

    def __init__(self, seconds: Floats, ended: Flags) -> None:
        self._all_ended = bool(ended.all())
        # At equal times, ends come before durations that were still at risk then.
        order = np.argsort(seconds) if self._all_ended else np.lexsort((~ended, seconds))
        self._seconds, self._ended, self._order = seconds[order], ended[order], order

    def quantiles(self, ranks: Sequence[float]) -> Floats:
        """Return quantiles of the whole sample, of shape (ranks,)."""
        if not self._ended.any():
            return np.full(len(ranks), np.inf)
        if self._all_ended:
            whole: Floats = np.quantile(self._seconds, ranks)
            return whole
        at_risk = np.arange(len(self._seconds), 0, -1)
        return _of_curve(self._seconds, (1 - self._ended / at_risk)[None], ranks)[0]

    def without(self, members: Places, ranks: Sequence[float]) -> Floats:
        """Return quantiles of the sample without each of these members, of shape (members, ranks)."""
        count = len(self._seconds)
        if count < 2:
            return np.full((len(members), len(ranks)), np.inf)
        position = np.empty(count, dtype=np.int64)
        position[self._order] = np.arange(count)
        at = position[members]
        if self._all_ended:
            return _interpolated(self._seconds, at, ranks)
        # Those before the removed member have one less at risk beside them.
        numbers = np.arange(count)
        at_risk = count - numbers - (numbers < at[:, None])
        factors = np.where(numbers == at[:, None], 1.0, 1 - self._ended / np.maximum(1, at_risk))
        found = _of_curve(self._seconds, factors, ranks)
        if int(self._ended.sum()) == count - 1:
            alone = ~self._ended[at]
            found[alone] = _interpolated(self._seconds, at[alone], ranks)
        return found


def quantiles_without(ordered: Floats, values: Floats, members: Flags, ranks: Sequence[float]) -> Floats:
    """Return quantiles of each column of a sample, of shape (values, ranks, columns), without each row of `values` that
    is one of its `members`. `ordered` has shape (n, columns), each column ascending; without any row left the quantiles
    are 0."""
    result = np.zeros((len(values), len(ranks), ordered.shape[1]))
    if len(ordered) and not members.all():
        result[~members] = np.quantile(ordered, ranks, axis=0)
    if len(ordered) > 1 and members.any():
        # Of equal values it does not matter which one is removed.
        at = (ordered[None] < values[members][:, None]).sum(axis=1)
        columns = np.arange(ordered.shape[1])
        for number, rank in enumerate(ranks):
            exact = (len(ordered) - 2) * rank
            low, high = int(np.floor(exact)), int(np.ceil(exact))
            below, above = ordered[low + (low >= at), columns], ordered[high + (high >= at), columns]
            result[members, number] = below + (above - below) * (exact - low)
    return result


def _interpolated(ordered: Floats, at: Places, ranks: Sequence[float]) -> Floats:
    """Return quantiles (linear interpolation) of an ordered sample without the element at each place."""
    exact = (len(ordered) - 2) * np.asarray(ranks)
    low, high = np.floor(exact).astype(np.int64), np.ceil(exact).astype(np.int64)
    below, above = ordered[low + (low >= at[:, None])], ordered[high + (high >= at[:, None])]
    result: Floats = below + (above - below) * (exact - low)
    return result


def _of_curve(seconds: Floats, factors: Floats, ranks: Sequence[float]) -> Floats:
    """Return the quantiles of survival curves, of shape (curves, ranks); `factors`, of shape (curves, n), are the
    shares that survive each of the ascending durations."""
    ended = 1 - np.cumprod(factors, axis=1)
    found = np.full((len(factors), len(ranks)), np.inf)
    for number, rank in enumerate(ranks):
        reached = ended >= rank - 1e-12
        some = reached.any(axis=1)
        found[some, number] = seconds[np.argmax(reached[some], axis=1)]
    return found
