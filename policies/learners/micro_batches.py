"""Rows of a batch with their weights in the loss, and micro-batches of padded rows.

Shapes: B rows, T padded tokens, N trained tokens of the micro-batch in row-major order.

Invariants:
- Weights are fixed for the whole batch, before it is divided: a token's weight depends on its trajectory only.
- A trajectory without trained tokens yields no rows. One with advantage 0 yields rows only if a term of the loss uses
  them. Both count in the denominators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.policies.learners.objectives.loss import trajectory_weights
from headrace.policies.learners.objectives.tokens import TrainedTokens
from headrace.policies.learners.progress import trained_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.types import Batch, Row
    from headrace.policies.learners.objectives.config import ObjectiveConfig
    from headrace.policies.learners.objectives.loss import Objective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedRow:
    """Row with the values shared by its tokens. `weight` multiplies the loss of each trained token; `trajectory` is the
    index of the row's trajectory in the batch."""

    row: Row
    advantage: float
    temperature: float
    weight: float
    trajectory: int


def weighted_rows(batch: Batch, objective: Objective, config: ObjectiveConfig) -> list[WeightedRow]:
    """Return the rows of `batch` that may have a gradient. They must be within the `RowLimits` of the learner."""
    zero_advantage = objective.uses_zero_advantage or config.uses_zero_advantage
    weights = trajectory_weights([trained_tokens(item) for item in batch.items], config)
    return [
        WeightedRow(
            row=row,
            advantage=item.advantage,
            temperature=item.trajectory.temperature,
            weight=weight,
            trajectory=index,
        )
        for index, (item, weight) in enumerate(zip(batch.items, weights, strict=True))
        if item.advantage != 0.0 or zero_advantage
        for row in item.trajectory.rows
        if row.loss_mask_T.any()
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows, padded on the right to the length of the longest one. `trained_BT` marks the trained tokens, and the arrays
    over N follow it in row-major order."""

    tokens_BT: torch.Tensor
    trained_BT: torch.Tensor
    behaviour_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    temperatures_N: torch.Tensor
    weights_N: torch.Tensor
    rows_N: torch.Tensor
    trajectories_N: torch.Tensor

    def trained_tokens(
        self, logprobs_N: torch.Tensor, entropies_N: torch.Tensor, reference_logprobs_N: torch.Tensor | None = None
    ) -> TrainedTokens:
        """Return the trained tokens with what the models computed for them."""
        return TrainedTokens(
            logprobs_N=logprobs_N,
            entropies_N=entropies_N,
            behaviour_logprobs_N=self.behaviour_logprobs_N,
            reference_logprobs_N=reference_logprobs_N,
            advantages_N=self.advantages_N,
            rows_N=self.rows_N,
            trajectories_N=self.trajectories_N,
        )


def collate(rows: Sequence[WeightedRow], device: torch.device) -> MicroBatch:
    """Pad `rows` on the right, where causal attention ignores the padding, and flatten the values of trained tokens."""
    longest = max(len(row.row.tokens_T) for row in rows)
    tokens_BT = np.zeros((len(rows), longest), dtype=np.int64)
    trained_BT = np.zeros((len(rows), longest), dtype=np.bool_)
    behaviour_BT = np.zeros((len(rows), longest), dtype=np.float32)
    for index, row in enumerate(rows):
        length = len(row.row.tokens_T)
        tokens_BT[index, :length] = row.row.tokens_T
        trained_BT[index, :length] = row.row.loss_mask_T
        behaviour_BT[index, :length] = row.row.logprobs_T
    counts = trained_BT.sum(axis=1)

    def spread(values: Sequence[float], dtype: type[np.generic] = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=dtype), counts)).to(device)

    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        trained_BT=torch.from_numpy(trained_BT).to(device),
        behaviour_logprobs_N=torch.from_numpy(behaviour_BT[trained_BT]).to(device),
        advantages_N=spread([row.advantage for row in rows]),
        temperatures_N=spread([row.temperature for row in rows]),
        weights_N=spread([row.weight for row in rows]),
        rows_N=spread(range(len(rows)), np.int64),
        trajectories_N=spread([row.trajectory for row in rows], np.int64),
    )
