"""Policy loss: GRPO with truncated importance weights and a directional clip, both on the ratio current / behaviour.

Shapes: B rows, T padded tokens, V vocabulary, N trained tokens of the micro-batch in row-major order.

Invariants:
- The ratio is relative to the policy that sampled the token (using the behaviour log-probability stored with it). With
  one update per batch, current / proximal is always 1, so clipping it would have no effect.
- A token whose ratio has passed the clip in the direction of its advantage has exactly zero gradient.
- The loss is a sum: the caller's weights define the reduction, so splitting a batch changes nothing.
- A trajectory contributes the mean over its trained tokens in all its rows, and a batch the mean over its trajectories:
  each token of trajectory i has the weight 1 / (batch_size * trained tokens of i), in any row or micro-batch.
- Trajectories with advantage exactly 0 or without trained tokens yield no rows, but count in the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.types import Batch, BatchItem, Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedRow:
    """Row with the values shared by its tokens. `weight` multiplies the loss of each trained token."""

    row: Row
    advantage: float
    temperature: float
    weight: float


def trained_tokens(item: BatchItem) -> int:
    """Return the number of trained tokens in all rows of a trajectory."""
    return sum(int(row.loss_mask_T.sum()) for row in item.trajectory.rows)


def weighted_rows(batch: Batch) -> list[WeightedRow]:
    """Return the rows of `batch` that have a gradient. They must be within the `RowLimits` of the learner."""
    rows: list[WeightedRow] = []
    for item in batch.items:
        tokens = trained_tokens(item)
        if item.advantage == 0.0 or tokens == 0:
            continue
        weight = 1.0 / (len(batch.items) * tokens)
        rows.extend(
            WeightedRow(row=row, advantage=item.advantage, temperature=item.trajectory.temperature, weight=weight)
            for row in item.trajectory.rows
            if row.loss_mask_T.any()
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipConfig:
    """Clip of the ratio to [1 - eps_low, 1 + eps_high], and the maximum importance weight `weight_cap` (C)."""

    eps_low: float
    eps_high: float
    weight_cap: float


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSums:
    """Detached sums over trained tokens, to be added over micro-batches and divided by `tokens`."""

    tokens: int = 0
    entropy: float = 0.0
    clipped: float = 0.0
    ratio: float = 0.0
    abs_log_ratio: float = 0.0

    def __add__(self, other: LossSums) -> LossSums:
        return LossSums(
            tokens=self.tokens + other.tokens,
            entropy=self.entropy + other.entropy,
            clipped=self.clipped + other.clipped,
            ratio=self.ratio + other.ratio,
            abs_log_ratio=self.abs_log_ratio + other.abs_log_ratio,
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

    def spread(values: list[float]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float32), counts)).to(device)

    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        trained_BT=torch.from_numpy(trained_BT).to(device),
        behaviour_logprobs_N=torch.from_numpy(behaviour_BT[trained_BT]).to(device),
        advantages_N=spread([row.advantage for row in rows]),
        temperatures_N=spread([row.temperature for row in rows]),
        weights_N=spread([row.weight for row in rows]),
    )


def policy_loss(
    logprobs_N: torch.Tensor, micro: MicroBatch, clip: ClipConfig, entropies_N: torch.Tensor
) -> tuple[torch.Tensor, LossSums]:
    """Return the weighted sum over trained tokens of

        l = - sg[min(r, C) * active] * A * exp(logp - sg[logp]),    r = exp(logp - logp_behaviour)
        active = not (A > 0 and r > 1 + eps_high  or  A < 0 and r < 1 - eps_low)

    with sg the stop-gradient, so that the gradient of a token is -min(r, C) A grad logp where active and 0 elsewhere.

    `active` is where PPO's max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A) (arXiv 1707.06347) has a gradient, with
    the group-relative advantage of GRPO (arXiv 2402.03300) and DAPO's higher upper bound (arXiv 2503.14476). min(r,
    C) is the weight of decoupled PPO (arXiv 2505.24298), capped, with the current policy as the proximal one; it
    bounds what a negative advantage with a large ratio adds.
    """
    log_ratio_N = logprobs_N.detach() - micro.behaviour_logprobs_N
    ratio_N = log_ratio_N.exp()
    passed_N = ((micro.advantages_N > 0) & (ratio_N > 1.0 + clip.eps_high)) | (
        (micro.advantages_N < 0) & (ratio_N < 1.0 - clip.eps_low)
    )
    scale_N = torch.where(passed_N, 0.0, ratio_N.clamp(max=clip.weight_cap) * micro.advantages_N * micro.weights_N)
    loss = -(scale_N * (logprobs_N - logprobs_N.detach()).exp()).sum()
    sums = LossSums(
        tokens=int(logprobs_N.numel()),
        entropy=float(entropies_N.detach().sum()),
        clipped=float(passed_N.sum()),
        ratio=float(ratio_N.sum()),
        abs_log_ratio=float(log_ratio_N.abs().sum()),
    )
    return loss, sums
