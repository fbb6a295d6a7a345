"""A mixed-effects model of censored values: the parts due to task, attempt and reward.

    value = mean + shift * (reward - mean reward) + task_deviation * u(task) + own_deviation * e(attempt)

with u and e standard normal. The likelihood is maximised by EM (A. P. Dempster, N. M. Laird, D. B. Rubin, J. R. Stat.
Soc. B 39, 1977): u is integrated over the nodes of a Gauss-Hermite rule, censored values over the normal tail beyond
their time, both exactly; each M-step is one weighted least squares.

Invariant: each step increases the likelihood; the result is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NODES: Final = 21
MOST_ITERATIONS: Final = 400
TOLERANCE: Final = 1e-5
LEAST_DEVIATION: Final = 1e-3
RIDGE: Final = 1e-6
"""Keeps the least-squares problem solvable if all rewards or tasks are equal."""

_erfc = np.vectorize(math.erfc, otypes=[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedFit:
    """Fitted parameters of the model. `reward_variance` is that of finished attempts."""

    mean: float
    shift: float
    task_deviation: float
    own_deviation: float
    reward_variance: float

    @property
    def deviation(self) -> float:
        """Standard deviation of one attempt of any task."""
        variance = self.task_deviation**2 + self.own_deviation**2 + self.shift**2 * self.reward_variance
        return math.sqrt(variance)

    @property
    def task_share(self) -> float:
        """Share of the variance that is common to attempts at one task, apart from rewards."""
        task, own = self.task_deviation**2, self.own_deviation**2
        return task / (task + own)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Data:
    """N values in G tasks; `centred_N` are rewards minus their mean, 0 where unknown."""

    values_N: Array
    ended_N: NDArray[np.bool_]
    task_N: NDArray[np.int64]
    centred_N: Array
    tasks: int


def fit_mixed(
    values: Sequence[float], finished: Sequence[bool], tasks: Sequence[str], rewards: Sequence[float | None]
) -> MixedFit:
    """Return the maximum likelihood parameters. If no task has two attempts, the effects of tasks and attempts cannot
    be separated, and `task_deviation` is 0."""
    known = [reward for reward in rewards if reward is not None]
    mean_reward = sum(known) / len(known) if known else 0.0
    names, task_N = np.unique(np.asarray(tasks), return_inverse=True)
    data = _Data(
        values_N=np.asarray(values, dtype=np.float64),
        ended_N=np.asarray(finished, dtype=np.bool_),
        task_N=task_N,
        centred_N=np.array([0.0 if reward is None else reward - mean_reward for reward in rewards]),
        tasks=len(names),
    )
    repeated = len(names) < len(data.values_N)
    nodes_K, weights_K = np.polynomial.hermite_e.hermegauss(NODES if repeated else 1)
    weights_K = weights_K / weights_K.sum()
    spread = max(LEAST_DEVIATION, float(np.std(data.values_N)))
    coefficients = np.array([float(np.mean(data.values_N)), 0.0, 0.6 * spread])
    own = 0.8 * spread
    for _ in range(MOST_ITERATIONS):
        before = np.append(coefficients, own)
        means_NK = _means(data, coefficients, nodes_K)
        share_NK = _posterior(data, means_NK, own, weights_K)[data.task_N]
        first_NK, second_NK = _moments(data, means_NK, own)
        coefficients = _least_squares(data, nodes_K, share_NK, first_NK)
        means_NK = _means(data, coefficients, nodes_K)
        squares_NK = second_NK - 2 * means_NK * first_NK + means_NK**2
        own = max(LEAST_DEVIATION, math.sqrt(max(0.0, float((share_NK * squares_NK).sum()) / len(data.values_N))))
        if np.abs(np.append(coefficients, own) - before).max() < TOLERANCE * spread:
            break
    return MixedFit(
        mean=float(coefficients[0]),
        shift=float(coefficients[1]),
        task_deviation=abs(float(coefficients[2])) if repeated else 0.0,
        own_deviation=own,
        reward_variance=float(np.var(known)) if known else 0.0,
    )


def _means(data: _Data, coefficients: Array, nodes_K: Array) -> Array:
    fixed_N = coefficients[0] + coefficients[1] * data.centred_N
    return np.asarray(fixed_N[:, None] + coefficients[2] * nodes_K[None, :])


def _posterior(data: _Data, means_NK: Array, own: float, weights_K: Array) -> Array:
    """Return the posterior probability [G, K] of each node for each task."""
    standard_NK = (data.values_N[:, None] - means_NK) / own
    log_NK = -0.5 * standard_NK**2 - math.log(own)
    censored_N = ~data.ended_N
    log_NK[censored_N] = np.log(np.maximum(_tail(standard_NK[censored_N]), 1e-300))
    log_GK = np.zeros((data.tasks, len(weights_K)))
    np.add.at(log_GK, data.task_N, log_NK)
    log_GK += np.log(weights_K)
    share_GK = np.exp(log_GK - log_GK.max(axis=1, keepdims=True))
    return np.asarray(share_GK / share_GK.sum(axis=1, keepdims=True))


def _moments(data: _Data, means_NK: Array, own: float) -> tuple[Array, Array]:
    """Return the conditional mean and mean square [N, K] of each value, given its observation."""
    first_NK = np.repeat(data.values_N[:, None], means_NK.shape[1], axis=1)
    second_NK = first_NK**2
    censored_N = ~data.ended_N
    if censored_N.any():
        means, bound = means_NK[censored_N], first_NK[censored_N]
        standard = (bound - means) / own
        # The hazard is the density over the tail; far out, where both vanish, it is `z + 1 / z`.
        density = np.exp(-0.5 * standard**2) / math.sqrt(2 * math.pi)
        far = standard > 8.0
        near = density / np.maximum(_tail(standard), 1e-300)
        hazard = np.where(far, standard + 1 / np.where(far, standard, 1.0), near)
        first_NK[censored_N] = means + own * hazard
        second_NK[censored_N] = own**2 + means**2 + own * hazard * (bound + means)
    return first_NK, second_NK


def _least_squares(data: _Data, nodes_K: Array, share_NK: Array, first_NK: Array) -> Array:
    """Return mean, shift and task deviation; the columns are 1, the centred reward, and the node."""
    ones_N = np.ones_like(data.centred_N)
    node_N, square_N = share_NK @ nodes_K, share_NK @ nodes_K**2
    columns = [ones_N, data.centred_N, node_N]
    normal = np.array([[float(first @ second) for second in columns] for first in columns])
    normal[2, 2] = float(square_N.sum())
    value_N = (share_NK * first_NK).sum(axis=1)
    right = [value_N.sum(), data.centred_N @ value_N, float((share_NK * first_NK * nodes_K).sum())]
    solution = np.linalg.solve(normal + RIDGE * np.eye(3), np.array(right, dtype=np.float64))
    return solution.astype(np.float64)


def _tail(standard: Array) -> Array:
    """Return P(Z > standard)."""
    return np.asarray(0.5 * _erfc(standard / math.sqrt(2.0))) if standard.size else standard
