"""Training data of slime's ranks from a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.step_scores import Credit, ScoredStep, StepScores, TokenSpan
from headrace.buffer.trajectories.types import (
    Batch,
    BatchId,
    BatchItem,
    BatchLease,
    GroupId,
    RolloutId,
    Row,
    Trajectory,
    VersionSpan,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import LearnerSettingsInvalid, RowUnusable
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.slime import batches

LIMITS = RowLimits(vocabulary=100, tokens=32)
PLAIN = ObjectiveConfig()


def row(mask: str, *, first: int = 1) -> Row:
    """A row with a token for each character; `x` is trained."""
    trained = np.array([letter == "x" for letter in mask])
    return Row(
        tokens_T=np.arange(first, first + len(mask), dtype=np.int32),
        loss_mask_T=trained,
        logprobs_T=np.where(trained, -0.5, 0).astype(np.float32),
        versions=(),
    )


def batch(*rollouts: tuple[Row, ...], temperature: float = 1.0) -> Batch:
    items = tuple(
        BatchItem(
            rollout_id=RolloutId(f"r{index}"),
            group_id=GroupId("g"),
            attempt=1,
            reward=float(index),
            advantage=index - 0.5,
            staleness=0,
            trajectory=Trajectory(rows=rows, temperature=temperature),
        )
        for index, rows in enumerate(rollouts)
    )
    lease = BatchLease(batch_id=BatchId("b"), epoch=1)
    return Batch(lease=lease, version=PolicyVersion(1, 0), items=items)


def test_rows_of_a_rollout_share_an_id_a_mask_sum_and_the_advantage() -> None:
    data = batches.train_data(batch((row("..x.xx"), row(".xx")), (row("...x"),)), LIMITS, PLAIN, temperature=1.0)
    assert data["rollout_ids"] == [0, 0, 1]
    assert data["rollout_mask_sums"] == [5, 5, 1]
    assert data["rewards"] == [-0.5, -0.5, 0.5]
    assert data["raw_reward"] == [0.0, 0.0, 1.0]
    assert data["sample_indices"] == [0, 1, 2]
    assert data["total_lengths"] == [6, 3, 4]


def test_a_response_begins_with_the_first_trained_token() -> None:
    data = batches.train_data(batch((row("..x.xx"),)), LIMITS, PLAIN, temperature=1.0)
    assert data["response_lengths"] == [4]
    assert data["loss_masks"][0].tolist() == [1, 0, 1, 1]
    assert data["rollout_log_probs"][0].tolist() == [-0.5, 0.0, -0.5, -0.5]
    assert data["tokens"][0].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_rollout_without_trained_tokens_still_counts() -> None:
    data = batches.train_data(
        batch((row("..."), row("..")), (row(".x"), row("...")), ()), LIMITS, PLAIN, temperature=1.0
    )
    assert data["rollout_ids"] == [0, 1, 2]
    assert [mask.tolist() for mask in data["loss_masks"]] == [[0], [1], [0]]
    assert data["rollout_mask_sums"] == [0, 1, 0]


@pytest.mark.parametrize(
    ("keys", "divisors"),
    [
        ({}, [5, 5, 1]),
        # slime divides by the two rollouts, too: the mean over 6 tokens, and the sum divided by 2 x 40.
        ({"loss_weight": "token"}, [3, 3, 3]),
        ({"loss_weight": "constant", "loss_constant": 40.0}, [40, 40, 40]),
    ],
)
def test_the_divisor_of_a_row_follows_from_the_weight_of_the_loss(keys: dict[str, Any], divisors: list[float]) -> None:
    given = batch((row("..x.xx"), row(".xx")), (row("...x"),))
    data = batches.train_data(given, LIMITS, ObjectiveConfig(**keys), temperature=1.0)
    assert data["rollout_mask_sums"] == divisors


def test_tokens_have_the_advantage_of_their_turn_and_the_staleness_of_their_version() -> None:
    old = PolicyVersion(1, 0)
    spans = (
        VersionSpan(start=1, end=3, version=old),
        VersionSpan(start=3, end=5, version=PolicyVersion(1, 2)),
        VersionSpan(start=5, end=6, version=old, stale_kv=True),
    )
    one = batch((replace(row(".xxx.x"), versions=spans),))
    scores = StepScores(
        credit=Credit.STEPS, outcome=0.0, coefficient=1.0, steps=(ScoredStep(2, 1.0, (TokenSpan(0, 3, 5),)),)
    )
    judged = replace(one.items[0], scores=scores, turn_advantages={2: 2.0})
    one = replace(one, version=PolicyVersion(1, 2), items=(judged,), staleness={old: 7})
    data = batches.train_data(one, LIMITS, PLAIN, temperature=1.0)
    assert data["advantages"][0].tolist() == [-0.5, -0.5, 2.0, 2.0, -0.5]
    assert data["values"][0].tolist() == [7, 7, 0, batches.UNTRAINED, -1]


def test_a_response_begins_with_the_first_token_that_has_a_weight() -> None:
    kinds = np.array([0, 2, 3, 1, 4, 2], np.uint8)
    given = batch((replace(row("....x."), kinds_T=kinds),), (row(".x"),))
    config = ObjectiveConfig(observation_coef=0.5, observation_mean="token")
    data = batches.train_data(given, LIMITS, config, temperature=1.0)
    assert data["response_lengths"] == [5, 1]
    assert data["loss_masks"][0].tolist() == [0, 0, 0, 1, 0]
    # Coefficient x rollouts / selected tokens; warnings are not selected.
    assert data["returns"][0] == pytest.approx([0.5, 0, 0, 0, 0.5], rel=1e-3)
    assert data["returns"][1].tolist() == [0]


@pytest.mark.parametrize(
    ("rows", "temperature", "problem"),
    [
        ((row("xx"),), 1.0, "the first token of a row is trained, but has no context"),
        ((row(".x", first=99),), 1.0, "outside the model's vocabulary of 100"),
        ((row("." * 32 + "x"),), 1.0, "a row of 33 tokens exceeds the learner's token budget of 32"),
        ((row(".x"),), 0.5, "sampled at temperature 0.5, but slime divides all logits by sampling.temperature 1:"),
        ((replace(row(".x"), logprobs_T=np.zeros(3, np.float32)),), 1.0, "differ in length"),
    ],
)
def test_rows_that_cannot_be_trained_are_refused(rows: tuple[Row, ...], temperature: float, problem: str) -> None:
    with pytest.raises(RowUnusable, match=problem) as caught:
        batches.train_data(batch((row("..."),), rows, temperature=temperature), LIMITS, PLAIN, temperature=1.0)
    assert list(caught.value.refused) == ["r1"]


def schedule(partitions: list[list[int]], *, steps: int = 1, rollouts: int = 2) -> batches.Schedule:
    return batches.Schedule(
        partitions=partitions,
        micro_batches=[[list(range(len(rows)))] for rows in partitions],
        micro_batch_counts=[1] * steps,
        rollouts=[rollouts] * steps,
    )


def test_each_rank_gets_its_rows_and_the_rewards_of_all() -> None:
    data = batches.train_data(batch((row("..x"), row(".xx")), (row("...x"),)), LIMITS, PLAIN, temperature=1.0)
    first, second = batches.rank_data(data, schedule([[2, 0], [1]]), rollouts=2)
    assert (first["partition"], second["partition"]) == ([2, 0], [1])
    assert [tokens.tolist() for tokens in first["tokens"]] == [[1, 2, 3, 4], [1, 2, 3]]
    assert first["rollout_mask_sums"] == [1, 3]
    assert first["total_lengths"] == second["total_lengths"] == [3, 3, 4]
    assert first["micro_batch_indices"] == [[0, 1]]


@pytest.mark.parametrize(
    ("made", "problem"),
    [
        (schedule([[0], [1]]), "1 steps of 2 of 3 rows, and drop the rest"),
        (schedule([[0, 1], [2]], steps=2), "2 steps of 3 of 3 rows"),
        (schedule([[0, 1], [2]], rollouts=1), r"divide the loss by \[1\] rollouts, the batch has 2"),
    ],
)
def test_a_schedule_that_is_not_one_step_over_all_rows_is_refused(made: batches.Schedule, problem: str) -> None:
    data = batches.train_data(batch((row("..x"), row(".xx")), (row("...x"),)), LIMITS, PLAIN, temperature=1.0)
    with pytest.raises(LearnerSettingsInvalid, match=problem):
        batches.rank_data(data, made, rollouts=2)
