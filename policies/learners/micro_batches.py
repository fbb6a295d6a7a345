"""Rows of a batch with their weights in the loss, and micro-batches of padded rows.

Shapes: B rows, T padded tokens, N trained tokens of the micro-batch in row-major order, M observed ones, S both.

Invariants:
- Weights are fixed for the whole batch, before it is divided: a token's weight depends on its trajectory only.
- A trajectory without trained tokens yields no rows. One without an advantage yields rows only if a term of the loss
  uses them. Both count in the denominators of the policy loss.
- Observed tokens are computed only at an update whose coefficient for them is above 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from headrace.buffer.trajectories.token_kinds import OBSERVED, TokenKind
from headrace.buffer.trajectories.types import Batch, BatchItem, Row
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.loss import Objective, trajectory_weights
from headrace.policies.learners.objectives.observation import observation_weights, observed_kinds_T
from headrace.policies.learners.objectives.tokens import TrainedTokens
from headrace.policies.learners.progress import trained_tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightedRow:
    """Row with the values shared by its tokens. `weight` multiplies the loss of each trained token; `trajectory` is the
    index of the row's trajectory in the batch, `reward` that of the trajectory. `advantages` are those of each trained
    token if a critic gives them or the row's turns have their own, in place of `advantage`. `observation_weights`
    multiply the cross-entropy of each observation and each warning; None if observed tokens are not computed."""

    row: Row
    advantage: float
    temperature: float
    weight: float
    trajectory: int
    reward: float
    advantages: npt.NDArray[np.float32] | None = None
    observation_weights: tuple[float, float] | None = None


def weighted_rows(batch: Batch, objective: Objective, config: ObjectiveConfig) -> list[WeightedRow]:
    """Return the rows of `batch` that may have a gradient. They must be within the `RowLimits` of the learner."""
    observes = config.observation_coef_at(batch.version.step) > 0
    zero_advantage = objective.uses_zero_advantage or config.uses_zero_advantage or observes
    weights = trajectory_weights([trained_tokens(item) for item in batch.items], config)
    rows = [
        WeightedRow(
            row=row,
            advantage=item.advantage,
            temperature=item.trajectory.temperature,
            weight=weight,
            trajectory=index,
            reward=item.reward,
            advantages=_advantages_of(item, number),
        )
        for index, (item, weight) in enumerate(zip(batch.items, weights, strict=True))
        if item.has_advantage or zero_advantage
        for number, row in enumerate(item.trajectory.rows)
        if row.loss_mask_T.any()
    ]
    if not observes:
        return rows
    kinds = [observed_kinds_T(row.row) for row in rows]
    by_row = observation_weights([[int((kinds_T == kind).sum()) for kind in OBSERVED] for kinds_T in kinds], config)
    return [replace(row, observation_weights=weights) for row, weights in zip(rows, by_row, strict=True)]


def _advantages_of(item: BatchItem, number: int) -> npt.NDArray[np.float32] | None:
    """Return the advantages of a row's trained tokens if some of its trajectory's turns have advantages of their
    own."""
    advantages_T = item.row_advantages(number)
    return None if advantages_T is None else advantages_T[item.trajectory.rows[number].loss_mask_T]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedTokens:
    """Observed tokens of a micro-batch. `trained_S` marks the trained ones among the tokens whose log-probabilities are
    computed, the others are observed."""

    trained_S: torch.Tensor
    weights_M: torch.Tensor
    warnings_M: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rows, padded on the right to the length of the longest one. `trained_BT` marks the trained tokens, and the arrays
    over N follow it in row-major order. `scored_BT` marks the observed tokens too, if those are computed."""

    tokens_BT: torch.Tensor
    trained_BT: torch.Tensor
    scored_BT: torch.Tensor
    temperatures_S: torch.Tensor
    behaviour_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    temperatures_N: torch.Tensor
    weights_N: torch.Tensor
    rows_N: torch.Tensor
    trajectories_N: torch.Tensor
    observed: ObservedTokens | None = None

    def of_trained(self, values_S: torch.Tensor) -> torch.Tensor:
        """Return the values of the trained tokens, of shape N."""
        return values_S if self.observed is None else values_S[self.observed.trained_S]

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

    trained, temperatures_N = torch.from_numpy(trained_BT).to(device), spread([row.temperature for row in rows])
    scored, temperatures_S, observed = trained, temperatures_N, None
    if rows[0].observation_weights is not None:
        scored, observed = _observed(rows, trained)
        # Observed tokens were not sampled: their cross-entropy is that of the model, at temperature 1.
        temperatures_S = torch.ones(len(observed.trained_S), device=device)
        temperatures_S[observed.trained_S] = temperatures_N
    advantages_N = spread([row.advantage for row in rows])
    if any(row.advantages is not None for row in rows):
        by_row = torch.split(advantages_N, counts.tolist())
        advantages_N = torch.cat(
            [
                of_row if row.advantages is None else torch.from_numpy(row.advantages).to(device)
                for row, of_row in zip(rows, by_row, strict=True)
            ]
        )
    return MicroBatch(
        tokens_BT=torch.from_numpy(tokens_BT).to(device),
        trained_BT=trained,
        scored_BT=scored,
        temperatures_S=temperatures_S,
        behaviour_logprobs_N=torch.from_numpy(behaviour_BT[trained_BT]).to(device),
        advantages_N=advantages_N,
        temperatures_N=temperatures_N,
        weights_N=spread([row.weight for row in rows]),
        rows_N=spread(range(len(rows)), np.int64),
        trajectories_N=spread([row.trajectory for row in rows], np.int64),
        observed=observed,
    )


def _observed(rows: Sequence[WeightedRow], trained_BT: torch.Tensor) -> tuple[torch.Tensor, ObservedTokens]:
    """Return the mask of trained and observed tokens, of shape BT, and the observed tokens."""
    kinds_BT = np.full(trained_BT.shape, TokenKind.SCAFFOLD, dtype=np.uint8)
    weights_BT = np.zeros(trained_BT.shape, dtype=np.float32)
    for index, row in enumerate(rows):
        kinds_T = observed_kinds_T(row.row)
        kinds_BT[index, : len(kinds_T)] = kinds_T
        for kind, weight in zip(OBSERVED, row.observation_weights or (), strict=True):
            weights_BT[index, : len(kinds_T)][kinds_T == kind] = weight
    observed_BT = kinds_BT != TokenKind.SCAFFOLD
    device = trained_BT.device
    scored_BT = trained_BT | torch.from_numpy(observed_BT).to(device)
    return scored_BT, ObservedTokens(
        trained_S=trained_BT[scored_BT],
        weights_M=torch.from_numpy(weights_BT[observed_BT]).to(device),
        warnings_M=torch.from_numpy(kinds_BT[observed_BT] == TokenKind.WARNING).to(device),
    )
