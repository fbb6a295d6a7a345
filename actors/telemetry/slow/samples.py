"""Quantiles of samples without one of their own members: what is typical of a rollout does not depend on it.

Arrays have a first dimension of samples of equal size, since a long run has thousands of small ones.

Invariant: a quantile without a member equals the quantile of the sample from which it was removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Places = NDArray[np.int64]

AT_ONCE: Final = 4_000_000
"""Largest number of comparisons that are held in memory."""


def quantiles_of(seconds: Floats, ended: Flags, ranks: Sequence[float]) -> Floats:
    """Return quantiles of one sample of durations, of shape (n,), of which some have not ended."""
    if ended.all() and len(ended):
        whole: Floats = np.quantile(seconds, ranks)
        return whole
    order = np.lexsort((~ended, seconds))
    at_risk = np.arange(len(seconds), 0, -1)
    return _of_curve(seconds[order], 1 - ended[order] / at_risk, ranks)


def durations_without(seconds: Floats, ended: Flags, members: Places, ranks: Sequence[float]) -> Floats:
    """Return quantiles of durations, of shape (samples, members, ranks), without each of `members` (samples, members),
    places in `seconds` and `ended` (samples, n). With all of a sample ended a quantile is interpolated; else it is that
    of the survival curve (`survival.SurvivalCurve`), infinite if too few have ended to say it."""
    samples, count = seconds.shape
    if count < 2:
        return np.full((samples, members.shape[1], len(ranks)), np.inf)
    # At equal times, ends come before durations that were still at risk then.
    order = np.lexsort((~ended, seconds), axis=-1)
    ordered, done = np.take_along_axis(seconds, order, 1), np.take_along_axis(ended, order, 1)
    at = np.take_along_axis(np.argsort(order, axis=1), members, 1)
    interpolated = np.stack(
        [_interpolated(ordered[:, :, None], at[:, :, None], count - 1, rank)[:, :, 0] for rank in ranks], axis=2
    )
    all_ended = done.sum(axis=1)[:, None] - np.take_along_axis(done, at, 1) == count - 1
    if all_ended.all():
        return interpolated
    numbers = np.arange(count)
    # Those before the removed member have one less at risk beside them.
    at_risk = count - numbers - (numbers < at[:, :, None])
    removed = numbers == at[:, :, None]
    factors = np.where(removed, 1.0, 1 - done[:, None] / np.maximum(1, at_risk))
    curves = _of_curve(np.broadcast_to(ordered[:, None], factors.shape), factors, ranks)
    return np.where(all_ended[:, :, None], interpolated, curves)


def robust_deviation(differences: Floats) -> Floats:
    """Return the standard deviation that differences from a median would have if they were normal, over the first
    axis: 1.4826 times their median absolute size."""
    deviation: Floats = 1.4826 * np.median(np.abs(differences), axis=0)
    return deviation


def columns_without(sample: Floats, values: Floats, members: Flags, ranks: Sequence[float]) -> Floats:
    """Return quantiles of each column of `sample` (samples, n, columns), of shape (samples, values, ranks, columns),
    without each row of `values` (samples, values, columns) that is one of its `members` (samples, values). Without any
    row left the quantiles are 0."""
    count, result = sample.shape[1], np.zeros((*values.shape[:2], len(ranks), sample.shape[2]))
    ordered = np.sort(sample, axis=1)
    step = max(1, AT_ONCE // max(1, values.shape[1] * sample.shape[1] * sample.shape[2]))
    for first in range(0, len(sample), step):
        some, given, own = ordered[first : first + step], values[first : first + step], members[first : first + step]
        # Of equal values it does not matter which one is removed; nothing lies behind the last.
        at = np.where(own[:, :, None], (some[:, None] < given[:, :, None]).sum(axis=2), count)
        for removed in (True, False):
            left = count - removed
            if left:
                chosen = own if removed else ~own
                for number, rank in enumerate(ranks):
                    result[first : first + step, :, number][chosen] = _interpolated(some, at, left, rank)[chosen]
    return result


def _interpolated(ordered: Floats, at: Places, left: int, rank: float) -> Floats:
    """Return a quantile (linear interpolation) of ordered samples (samples, n, columns) of which `left` elements are
    left without those at `at` (samples, removed, columns)."""
    exact = (left - 1) * rank
    low, high = int(np.floor(exact)), int(np.ceil(exact))
    last = ordered.shape[1] - 1
    below = np.take_along_axis(ordered, np.minimum(last, low + (low >= at)), 1)
    above = np.take_along_axis(ordered, np.minimum(last, high + (high >= at)), 1)
    result: Floats = below + (above - below) * (exact - low)
    return result


def _of_curve(seconds: Floats, factors: Floats, ranks: Sequence[float]) -> Floats:
    """Return the quantiles of survival curves, of shape (..., ranks); `factors`, of shape (..., n), are the shares that
    survive each of the ascending durations."""
    ended = 1 - np.cumprod(factors, axis=-1)
    found = np.full((*factors.shape[:-1], len(ranks)), np.inf)
    for number, rank in enumerate(ranks):
        reached = ended >= rank - 1e-12
        first = np.argmax(reached, axis=-1)[..., None] if factors.shape[-1] else None
        if first is not None:
            value = np.take_along_axis(seconds, first, -1)[..., 0]
            found[..., number] = np.where(reached.any(axis=-1), value, np.inf)
    return found
