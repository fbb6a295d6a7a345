"""Converts a batch to weighted rows.

Invariants:
- A trajectory contributes the mean over its trained tokens in all its rows, and a batch the mean over its trajectories:
  each token of trajectory i has the weight 1 / (batch_size * trained tokens of i), in any row or micro-batch.
- Trajectories with advantage exactly 0 or without trained tokens yield no rows, but count in the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.policies.errors import RowUnusable

if TYPE_CHECKING:
    from headrace.buffer.types import Batch, BatchItem, Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedRow:
    """Row with the values that its tokens share. `weight` multiplies the loss of each trained token."""

    row: Row
    advantage: float
    temperature: float
    weight: float


def trained_tokens(item: BatchItem) -> int:
    """Return the number of trained tokens in all rows of a trajectory."""
    return sum(int(row.loss_mask_T.sum()) for row in item.trajectory.rows)


def weighted_rows(batch: Batch, *, vocabulary: int) -> list[WeightedRow]:
    """Return the rows of `batch` that have a gradient. Raises RowUnusable for a row that cannot be trained."""
    rows: list[WeightedRow] = []
    for item in batch.items:
        tokens = trained_tokens(item)
        if item.advantage == 0.0 or tokens == 0:
            continue
        weight = 1.0 / (len(batch.items) * tokens)
        for row in item.trajectory.rows:
            where, length = f"rollout {item.rollout_id}", len(row.tokens_T)
            if not length == len(row.loss_mask_T) == len(row.logprobs_T):
                raise RowUnusable(f"{where}: tokens, mask and log-probabilities differ in length")
            if length and row.loss_mask_T[0]:
                raise RowUnusable(f"{where}: the first token of a row has no context and cannot be trained: mask it")
            if length and not 0 <= int(row.tokens_T.min()) <= int(row.tokens_T.max()) < vocabulary:
                raise RowUnusable(
                    f"{where}: a token id is outside the model's vocabulary of {vocabulary}: check the tokenizer"
                )
            if not item.trajectory.temperature > 0.0:
                raise RowUnusable(f"{where}: temperature {item.trajectory.temperature} has no gradient: sample above 0")
            if row.loss_mask_T.any():
                rows.append(
                    WeightedRow(
                        row=row, advantage=item.advantage, temperature=item.trajectory.temperature, weight=weight
                    )
                )
    return rows
