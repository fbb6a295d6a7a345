"""Training data of slime's ranks, from a batch.

Invariants:
- All rows of a rollout share one rollout id and one divisor (with `loss_weight = "trajectory"` its trained tokens in
  all rows), so that slime's loss of a rollout does not depend on how it is divided into rows.
- `rollout_mask_sums`, by which slime divides the sum over a row's tokens, follow from `loss_weight`.
- Advantages are the buffer's, for each token.
- Every rollout of the batch has a row, because slime counts rollouts by their rows: one without trained tokens has a
  row of two tokens, masked.
- One batch is one optimizer step. A schedule that would drop a row or make two steps of it is refused.

In slime's words a row is a sample: a prompt, which ends before the first token with a loss, and a response with a mask.
Arrays over the response: `values`, of which slime's policy has no use, are the staleness of trained tokens, and
`returns` the weights of observations (`token_terms`).
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.token_kinds import OBSERVED
from headrace.buffer.trajectories.types import Batch, BatchItem, Row
from headrace.policies.errors import LearnerSettingsInvalid, RowUnusable
from headrace.policies.learners.logprob_drift import staleness_T
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.observation import observation_weights, observed_kinds_T
from headrace.policies.learners.progress import trained_tokens

UNTRAINED = -2
"""Staleness of a token that is not trained."""
WHOLE_BATCH = ("raw_reward", "total_lengths")
"""Keys with one value per row of the batch, which slime divides in the ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Result of slime's `build_dp_schedule`: rows of each data-parallel rank, each rank's micro-batches (indices into
    its rows), and per optimizer step the micro-batches of a rank and the rollouts."""

    partitions: Sequence[Sequence[int]]
    micro_batches: Sequence[Sequence[Sequence[int]]]
    micro_batch_counts: Sequence[int]
    rollouts: Sequence[int]


def train_data(batch: Batch, limits: RowLimits, config: ObjectiveConfig, *, temperature: float) -> dict[str, list[Any]]:
    """Return slime's training data of a whole batch: one value per row and key. `temperature` is the one by which slime
    divides logits. Raises RowUnusable with the rollouts that cannot be trained."""
    refused = {item.rollout_id: why for item in batch.items if (why := _violation(item, limits, temperature))}
    if refused:
        rollout_id, why = next(iter(refused.items()))
        raise RowUnusable(f"{len(refused)} of {len(batch.items)} rollouts, first {rollout_id}: {why}", refused)
    data: defaultdict[str, list[Any]] = defaultdict(list)
    weights = _observation_weights(batch, config)
    mean_tokens = sum(map(trained_tokens, batch.items)) / len(batch.items)
    for rollout, item in enumerate(batch.items):
        rows = [number for number, row in enumerate(item.trajectory.rows) if row.loss_mask_T.any()]
        samples = [_sample(batch, item, number, next(weights)) for number in rows] or [_nothing_trained()]
        # slime divides by the number of rollouts too.
        divisors = {"trajectory": trained_tokens(item), "token": mean_tokens, "constant": config.loss_constant}
        for sample in samples:
            shared = {
                "rewards": item.advantage,
                "raw_reward": item.reward,
                "truncated": 0,
                "sample_indices": len(data["tokens"]),
                "rollout_ids": rollout,
                "rollout_mask_sums": divisors[config.loss_weight],
            }
            for name, value in (sample | shared).items():
                data[name].append(value)
    return data


def _violation(item: BatchItem, limits: RowLimits, temperature: float) -> str:
    trained = any(row.loss_mask_T.any() for row in item.trajectory.rows)
    if trained and item.trajectory.temperature != temperature:
        return (
            f"it was sampled at temperature {item.trajectory.temperature:g}, but slime divides all logits by "
            f"sampling.temperature {temperature:g}: sample all training rollouts at that"
        )
    return limits.violation(item.trajectory)


def scheduled_data(
    batch: Batch, limits: RowLimits, config: ObjectiveConfig, *, args: Namespace, parallel: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the data of each data-parallel rank, by slime's own schedule for its arguments and layout. slime must be
    importable. Raises RowUnusable, LearnerSettingsInvalid."""
    from slime.utils.dp_schedule import build_dp_schedule

    data = train_data(batch, limits, config, temperature=args.rollout_temperature)
    partitions, micro_batches, counts, rollouts = build_dp_schedule(
        args,
        parallel,
        data["total_lengths"],
        global_batch_size=args.global_batch_size,
        rollout_indices=data["rollout_ids"],
    )
    schedule = Schedule(
        partitions=partitions, micro_batches=micro_batches, micro_batch_counts=counts, rollouts=rollouts
    )
    return rank_data(data, schedule, rollouts=len(batch.items))


def rank_data(data: Mapping[str, Sequence[Any]], schedule: Schedule, *, rollouts: int) -> list[dict[str, Any]]:
    """Return the data of each data-parallel rank. `rollouts` is the batch size. Raises LearnerSettingsInvalid for a
    schedule that is not one optimizer step over all rows."""
    scheduled = sorted(row for rows in schedule.partitions for row in rows)
    if len(schedule.micro_batch_counts) != 1 or scheduled != list(range(len(data["tokens"]))):
        raise LearnerSettingsInvalid(
            f"slime would make {len(schedule.micro_batch_counts)} steps of {len(scheduled)} of {len(data['tokens'])} "
            f"rows, and drop the rest: buffer.batch_size must equal slime's global batch size ({schedule.rollouts})"
        )
    if list(schedule.rollouts) != [rollouts]:
        raise LearnerSettingsInvalid(
            f"slime would divide the loss by {schedule.rollouts} rollouts, the batch has {rollouts}: make "
            "buffer.batch_size equal to slime's global batch size"
        )
    return [
        {
            "partition": list(rows),
            **{name: [values[row] for row in rows] for name, values in data.items() if name not in WHOLE_BATCH},
            **{name: data[name] for name in WHOLE_BATCH},
            "global_batch_sizes": schedule.rollouts,
            "num_microbatches": schedule.micro_batch_counts,
            "micro_batch_indices": micro_batches,
        }
        for rows, micro_batches in zip(schedule.partitions, schedule.micro_batches, strict=True)
    ]


def _sample(batch: Batch, item: BatchItem, number: int, weights_T: npt.NDArray[np.float32]) -> dict[str, Any]:
    row: Row = item.trajectory.rows[number]
    prompt = int(np.argmax(row.loss_mask_T | (weights_T > 0)))
    advantages_T = item.row_advantages(number)
    if advantages_T is None:
        advantages_T = np.full(len(row.tokens_T), item.advantage, dtype=np.float32)
    return {
        "tokens": row.tokens_T,
        "total_lengths": len(row.tokens_T),
        "response_lengths": len(row.tokens_T) - prompt,
        "loss_masks": row.loss_mask_T[prompt:].astype(np.int32),
        "rollout_log_probs": row.logprobs_T[prompt:],
        "advantages": advantages_T[prompt:],
        "values": np.where(row.loss_mask_T, staleness_T(batch, row), UNTRAINED)[prompt:].astype(np.float32),
        "returns": weights_T[prompt:],
    }


def _observation_weights(batch: Batch, config: ObjectiveConfig) -> Iterator[npt.NDArray[np.float32]]:
    """Return the weights of the cross-entropy of the tokens of each row with trained ones, in order and of shape T,
    with the coefficient, times the rollouts by which slime divides."""
    rows = [row for item in batch.items for row in item.trajectory.rows if row.loss_mask_T.any()]
    coefficient = config.observation_coef_at(batch.version.step) * len(batch.items)
    kinds = [observed_kinds_T(row) for row in rows]
    by_row = observation_weights([[int((kinds_T == kind).sum()) for kind in OBSERVED] for kinds_T in kinds], config)
    for kinds_T, weights in zip(kinds, by_row, strict=True):
        of_kind = [
            np.where(kinds_T == kind, coefficient * weight, 0) for kind, weight in zip(OBSERVED, weights, strict=True)
        ]
        yield np.sum(of_kind, axis=0, dtype=np.float32)


def _nothing_trained() -> dict[str, Any]:
    """Return a row that adds 0 to loss and gradient."""
    return {
        "tokens": np.zeros(2, np.int32),
        "total_lengths": 2,
        "response_lengths": 1,
        "loss_masks": np.zeros(1, np.int32),
        "rollout_log_probs": np.zeros(1, np.float32),
        "advantages": np.zeros(1, np.float32),
        "values": np.full(1, UNTRAINED, np.float32),
        "returns": np.zeros(1, np.float32),
    }
