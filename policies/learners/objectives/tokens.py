"""Flat arrays of the trained tokens of whole rows, and their means over rows.

Shapes: N trained tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainedTokens:
    """Trained tokens of a micro-batch, in any order.

    All trained tokens of a row are in the same micro-batch; those of a trajectory may be in several. Log-probabilities
    are natural logarithms under the distribution at the sampling temperature. Only `logprobs_N` and `entropies_N` have
    a gradient."""

    logprobs_N: Tensor
    """Under the weights in training."""
    entropies_N: Tensor
    """Entropies of the distributions from which `logprobs_N` are, in nats."""
    behaviour_logprobs_N: Tensor
    """Under the weights that sampled the token."""
    reference_logprobs_N: Tensor | None
    """Under the frozen start model; None if no term uses them."""
    advantages_N: Tensor
    rows_N: Tensor
    """Index of the token's row, from 0."""
    trajectories_N: Tensor
    """Index of the token's trajectory in the batch."""

    def log_ratios_N(self) -> Tensor:
        """Return log(current / behaviour) of each token, without gradient."""
        return self.logprobs_N.detach() - self.behaviour_logprobs_N

    def row_means_N(self, values_N: Tensor) -> Tensor:
        """Return, for each token, the mean of `values_N` over the tokens of its row."""
        rows = int(self.rows_N.max()) + 1 if len(self.rows_N) else 0
        sums_R = values_N.new_zeros(rows).index_add(0, self.rows_N, values_N)
        counts_R = torch.bincount(self.rows_N, minlength=rows)
        return (sums_R / counts_R)[self.rows_N]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenLoss:
    """Loss of each token, not yet weighted, and values for the metrics of a step: the mean of each over the trained
    tokens of the batch is reported under its name."""

    loss_N: Tensor
    metrics: Mapping[str, Tensor]
