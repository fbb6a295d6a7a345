"""The policy loss: its gradient is the formula's, the brake acts, and no split of a batch changes anything."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.packing import pack
from headrace.buffer.types import (
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
from headrace.buffer.versions import PolicyVersion
from headrace.policies.learners.logprob_head import trained_logprobs
from headrace.policies.learners.objectives import (
    ClipConfig,
    LossSums,
    MicroBatch,
    WeightedRow,
    collate,
    policy_loss,
    weighted_rows,
)

BRAKES = ClipConfig(eps_low=0.2, eps_high=0.28, weight_cap=2.0)
UNCLIPPED = ClipConfig(eps_low=1.0, eps_high=math.inf, weight_cap=2.0)
VOCABULARY = 11
VERSION = PolicyVersion(1, 0)


def micro_batch(behaviour: list[float], advantages: list[float]) -> MicroBatch:
    count = len(behaviour)
    return MicroBatch(
        tokens_BT=torch.zeros(1, count + 1, dtype=torch.long),
        trained_BT=torch.tensor([[False] + [True] * count]),
        behaviour_logprobs_N=torch.tensor(behaviour),
        advantages_N=torch.tensor(advantages),
        temperatures_N=torch.ones(count),
        weights_N=torch.full((count,), 1.0 / count),
    )


def gradient(ratios: list[float], advantages: list[float], brakes: ClipConfig = BRAKES) -> list[float]:
    """d loss / d logp per token when current / behaviour is `ratios`."""
    logprobs = torch.full((len(ratios),), -1.0, requires_grad=True)
    micro = micro_batch([-1.0 - math.log(ratio) for ratio in ratios], advantages)
    loss, _ = policy_loss(logprobs, micro, brakes, torch.zeros(len(ratios)))
    loss.backward()
    assert logprobs.grad is not None
    return [value * len(ratios) for value in logprobs.grad.tolist()]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, -1.0),
        (1.0, -2.0, 2.0),
        (1.27, 1.0, -1.27),
        (0.5, 1.0, -0.5),
        (0.81, -1.0, 0.81),
        (1.9, -1.0, 1.9),
        (7.0, -1.0, 2.0),
    ],
)
def test_the_gradient_is_minus_capped_ratio_times_advantage(ratio: float, advantage: float, expected: float) -> None:
    assert gradient([ratio], [advantage]) == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.29, 1.0), (50.0, 0.1), (0.79, -1.0), (0.01, -3.0)])
def test_the_gradient_is_zero_beyond_the_clip_in_the_advantages_direction(ratio: float, advantage: float) -> None:
    assert gradient([ratio, 1.0], [advantage, advantage])[0] == 0.0
    assert gradient([ratio, 1.0], [advantage, advantage], UNCLIPPED)[0] != 0.0


def test_stale_behaviour_logprobs_clip_the_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = (0.5 * torch.randn(200, generator=generator)).exp().tolist()
    advantages = torch.randn(200, generator=generator).sign().tolist()
    clipped, unclipped = (torch.tensor(gradient(ratios, advantages, brakes)).norm() for brakes in (BRAKES, UNCLIPPED))
    assert 0.0 < clipped < 0.95 * unclipped
    fresh = [1.0] * 200
    assert gradient(fresh, advantages, BRAKES) == gradient(fresh, advantages, UNCLIPPED)


def test_loss_and_sums_are_over_trained_tokens() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0])
    micro = micro_batch([-1.0, -1.0 - math.log(2.0), -1.0 + math.log(2.0)], [1.0, 1.0, 1.0])
    loss, sums = policy_loss(logprobs, micro, BRAKES, torch.tensor([0.5, 1.0, 1.5]))
    assert float(loss) == pytest.approx(-(1.0 + 0.0 + 0.5) / 3)
    expected = LossSums(tokens=3, entropy=3.0, clipped=1.0, ratio=3.5, abs_log_ratio=2 * math.log(2.0))
    assert sums.tokens == expected.tokens
    for name in ("entropy", "clipped", "ratio", "abs_log_ratio"):
        assert getattr(sums, name) == pytest.approx(getattr(expected, name), rel=1e-5)


def test_a_non_finite_advantage_reaches_the_gradient() -> None:
    assert math.isnan(gradient([1.0, 1.0], [math.nan, 1.0])[0])


def test_logprobs_match_the_temperature_scaled_softmax() -> None:
    row = weighted(tokens=[3, 1, 4], mask=[False, False, True], temperature=0.5)
    logits = torch.randn(1, 3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logprobs, entropies = logprobs_of(logits, collate([row], torch.device("cpu")))
    probabilities = torch.softmax(logits[0, 1] / 0.5, dim=-1)
    assert logprobs.tolist() == pytest.approx([float(probabilities[4].log())], rel=1e-5)
    assert entropies.tolist() == pytest.approx([float(torch.special.entr(probabilities).sum())], rel=1e-5)


def logprobs_of(logits_BTV: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the trained tokens, for a head that changes nothing."""
    identity_VV = torch.eye(VOCABULARY)
    return trained_logprobs(logits_BTV, identity_VV, micro.tokens_BT, micro.trained_BT, micro.temperatures_N)


def weighted(*, tokens: list[int], mask: list[bool], temperature: float = 1.0) -> WeightedRow:
    return WeightedRow(row=make_row(tokens, mask), advantage=1.0, temperature=temperature, weight=1.0)


def make_row(tokens: list[int], mask: list[bool]) -> Row:
    trained = np.array(mask, dtype=np.bool_)
    return Row(
        tokens_T=np.array(tokens, dtype=np.int32),
        loss_mask_T=trained,
        logprobs_T=np.where(trained, -2.0, 0.0).astype(np.float32),
        versions=tuple(VersionSpan(start=int(at), end=int(at) + 1, version=VERSION) for at in np.flatnonzero(trained)),
    )


def make_batch(items: list[tuple[float, list[Row]]], *, temperature: float = 1.0) -> Batch:
    members = tuple(
        BatchItem(
            rollout_id=RolloutId(f"r{index}"),
            group_id=GroupId("g"),
            attempt=1,
            reward=1.0,
            advantage=advantage,
            staleness=0,
            trajectory=Trajectory(rows=tuple(rows), temperature=temperature),
        )
        for index, (advantage, rows) in enumerate(items)
    )
    return Batch(lease=BatchLease(batch_id=BatchId("b"), epoch=1), version=VERSION, items=members)


rows_strategy = st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.booleans()), min_size=2, max_size=9).map(
    lambda pairs: make_row([token for token, _ in pairs], [False, *[trained for _, trained in pairs[1:]]])
)
items_strategy = st.lists(
    st.tuples(st.sampled_from([-1.5, -0.3, 0.0, 0.7, 2.0]), st.lists(rows_strategy, min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


def loss_and_gradient(batch: Batch, token_budget: int) -> tuple[float, torch.Tensor]:
    """With a bigram table as the model: logits at t are the table's row of the token at t."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(2)).requires_grad_()
    rows = weighted_rows(batch)
    total = 0.0
    for indices in pack([len(row.row.tokens_T) for row in rows], token_budget=token_budget):
        micro = collate([rows[index] for index in indices], torch.device("cpu"))
        logprobs, entropies = logprobs_of(table[micro.tokens_BT], micro)
        loss, _ = policy_loss(logprobs, micro, BRAKES, entropies)
        loss.backward()
        total += float(loss.detach())
    return total, torch.zeros_like(table) if table.grad is None else table.grad


@settings(deadline=None, max_examples=40)
@given(items=items_strategy, budget=st.integers(9, 60))
def test_splitting_into_micro_batches_does_not_change_the_result(
    items: list[tuple[float, list[Row]]], budget: int
) -> None:
    batch = make_batch(items)
    one_loss, one_gradient = loss_and_gradient(batch, 10_000)
    loss, grad = loss_and_gradient(batch, budget)
    assert loss == pytest.approx(one_loss, abs=1e-5)
    torch.testing.assert_close(grad, one_gradient, atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=40)
@given(items=items_strategy)
def test_splitting_a_trajectory_into_rows_changes_nothing(items: list[tuple[float, list[Row]]]) -> None:
    """A row and, instead, one row per trained token (the same context, the other tokens masked)."""
    split = [(advantage, [part for row in rows for part in one_row_per_token(row)]) for advantage, rows in items]
    whole_loss, whole_gradient = loss_and_gradient(make_batch(items), 1000)
    split_loss, split_gradient = loss_and_gradient(make_batch(split), 1000)
    assert split_loss == pytest.approx(whole_loss, abs=1e-5)
    torch.testing.assert_close(split_gradient, whole_gradient, atol=1e-5, rtol=1e-4)


def one_row_per_token(row: Row) -> list[Row]:
    positions = np.flatnonzero(row.loss_mask_T).tolist()
    return [make_row(row.tokens_T[: at + 1].tolist(), [index == at for index in range(at + 1)]) for at in positions]


@given(items=items_strategy)
def test_each_trajectory_has_the_same_weight(items: list[tuple[float, list[Row]]]) -> None:
    rows = weighted_rows(make_batch(items))
    contributing = sum(adv != 0.0 and any(row.loss_mask_T.any() for row in parts) for adv, parts in items)
    total = sum(row.weight * int(row.row.loss_mask_T.sum()) for row in rows)
    assert total == pytest.approx(contributing / len(items))
