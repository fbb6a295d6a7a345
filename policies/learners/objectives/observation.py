"""Cross-entropy of observed tokens, beside the policy loss (ECHO, arXiv 2605.24517).

Invariants:
- It has denominators of its own, over the whole batch: it does not change the weight of the policy loss, and dividing
  the batch into micro-batches or ranks changes nothing.
- A coefficient of 0 leaves no trace: nothing else is computed, and losses and gradients are those without the term.

Shapes: M observed tokens of a micro-batch in row-major order, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.buffer.trajectories.token_kinds import OBSERVED, TokenKind
from headrace.buffer.trajectories.types import Row
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.token_sums import ObservationSums

if TYPE_CHECKING:
    from torch import Tensor

_EMPTY = 1e-3
"""Added to denominators by the published code."""


def observed_kinds_T(row: Row) -> npt.NDArray[np.uint8]:
    """Return the kinds of observed tokens, and `SCAFFOLD` for all others and the first token, which has no context."""
    scaffold = np.uint8(TokenKind.SCAFFOLD)
    if row.kinds_T is None:
        return np.full(len(row.tokens_T), scaffold)
    kinds_T = np.where(np.isin(row.kinds_T, OBSERVED) & ~row.loss_mask_T, row.kinds_T, scaffold)
    kinds_T[0] = scaffold
    return kinds_T


def observation_weights(counts: Sequence[Sequence[int]], config: ObjectiveConfig) -> list[tuple[float, float]]:
    """Return the weights of every observation and of every warning in each row of a batch, given their numbers in each
    row.

    `sequence` divides by the observed tokens of the row, warnings included, and the number of rows; `token` by the
    selected tokens of the batch."""
    of_warnings = float(config.observation_target == "full")
    if config.observation_mean == "token":
        weight = 1.0 / (sum(observations + of_warnings * warnings for observations, warnings in counts) + _EMPTY)
        return [(weight, of_warnings * weight)] * len(counts)
    by_row = (1.0 / (len(counts) * (sum(row) + _EMPTY)) for row in counts)
    return [(weight, of_warnings * weight) for weight in by_row]


def observation_loss(logprobs_M: Tensor, weights_M: Tensor, warnings_M: Tensor) -> tuple[Tensor, ObservationSums]:
    """Return the sum of weights x cross-entropy in nats, a scalar with gradient to `logprobs_M` (also if M is 0), and
    its sums. `warnings_M` marks warnings; a token that is not selected has weight 0."""
    losses_M = -logprobs_M
    loss = (losses_M * weights_M).sum()
    plain_M = losses_M.detach()
    return loss, ObservationSums(
        loss=float(loss.detach()),
        selected=int((weights_M > 0).sum()),
        observations=int((~warnings_M).sum()),
        warnings=int(warnings_M.sum()),
        observation_sum=float(plain_M[~warnings_M].sum()),
        warning_sum=float(plain_M[warnings_M].sum()),
    )
