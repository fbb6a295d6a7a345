"""For every objective, correction, term and weight: dividing a batch changes nothing.

The model is a bigram table: the logits at a position are the table's row of the token there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.trajectories.packing import distribute, pack
from headrace.buffer.trajectories.token_kinds import TokenKind
from headrace.buffer.trajectories.types import Batch, Row
from headrace.policies.learners.micro_batches import WeightedRow, collate, weighted_rows
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.loss import weighted_loss
from headrace.policies.learners.objectives.observation import observation_loss
from headrace.policies.learners.objectives.token_sums import TokenSums
from support.objective_cases import SETTINGS, logprobs_of, make_batch, make_row, objective_of

VOCABULARY = 11
WHOLE = 10_000
"""Token budget of a micro-batch with all rows."""
OF_TOKENS = [name for name, keys in SETTINGS.items() if keys.get("objective") != "gspo" and "sequence_mask" not in keys]

rows_strategy = st.lists(st.tuples(st.integers(0, VOCABULARY - 1), st.booleans()), min_size=2, max_size=9).map(
    lambda pairs: make_row([token for token, _ in pairs], [False, *[trained for _, trained in pairs[1:]]])
)
items_strategy = st.lists(
    st.tuples(st.sampled_from([-1.5, -0.3, 0.0, 0.7, 2.0]), st.lists(rows_strategy, min_size=1, max_size=4)),
    min_size=1,
    max_size=6,
)


def table_of(seed: int) -> torch.Tensor:
    return 0.3 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))


Step: TypeAlias = tuple[float, torch.Tensor, TokenSums]


def step(rows: Sequence[WeightedRow], config: ObjectiveConfig, *, token_budget: int) -> Step:
    """Loss, gradient and metrics of rows in micro-batches."""
    table, reference = table_of(2).requires_grad_(), table_of(3)
    total, sums = 0.0, TokenSums()
    for indices in pack([len(row.row.tokens_T) for row in rows], token_budget=token_budget):
        micro = collate([rows[index] for index in indices], torch.device("cpu"))
        logprobs_S, entropies_S = logprobs_of(table[micro.tokens_BT], micro)
        logprobs, entropies = micro.of_trained(logprobs_S), micro.of_trained(entropies_S)
        reference_logprobs = logprobs_of(reference[micro.tokens_BT], micro)[0] if config.kl_coef else None
        tokens = micro.trained_tokens(logprobs, entropies, reference_logprobs)
        loss, part = weighted_loss(tokens, micro.weights_N, objective_of(config), config)
        if (extra := micro.observed) is not None:
            term, _ = observation_loss(logprobs_S[~extra.trained_S], extra.weights_M, extra.warnings_M)
            loss = loss + config.observation_coef * term
        loss.backward()
        total, sums = total + float(loss.detach()), sums + part
    return total, torch.zeros_like(table) if table.grad is None else table.grad, sums


def rows_of(batch: Batch, config: ObjectiveConfig) -> list[WeightedRow]:
    return weighted_rows(batch, objective_of(config), config)


def assert_same(parts: Sequence[Step], whole: Step) -> None:
    losses, gradients, sums = zip(*parts, strict=True)
    assert sum(losses) == pytest.approx(whole[0], abs=1e-5)
    torch.testing.assert_close(sum(gradients), whole[1], atol=1e-5, rtol=1e-4)
    assert sum(sums, TokenSums()).means() == pytest.approx(whole[2].means(), rel=1e-4, abs=1e-6)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("name", SETTINGS)
@settings(deadline=None, max_examples=8)
@given(items=items_strategy, budget=st.integers(9, 60), data=st.data())
def test_splitting_into_micro_batches_or_ranks_does_not_change_the_result(
    name: str, items: list[tuple[float, list[Row]]], budget: int, data: st.DataObject
) -> None:
    config = ObjectiveConfig(**SETTINGS[name])
    rows = rows_of(make_batch(items), config)
    whole = step(rows, config, token_budget=WHOLE)
    assert_same([step(rows, config, token_budget=budget)], whole)
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    at_random = [[index for index, rank in enumerate(ranks) if rank == number] for number in range(3)]
    for shares in (at_random, distribute([len(row.row.tokens_T) for row in rows], ranks=3)):
        parts = [step([rows[index] for index in share], config, token_budget=budget) for share in shares]
        assert_same(parts, whole)


@st.composite
def observing_rows(draw: st.DrawFn) -> Row:
    """A row with tokens of all kinds, or without kinds."""
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=2, max_size=9))
    kinds = [TokenKind.PROMPT, *(draw(st.sampled_from(TokenKind)) for _ in tokens[1:])]
    mask = [kind is TokenKind.SAMPLED and draw(st.booleans()) for kind in kinds]
    return make_row(tokens, mask, kinds=kinds if draw(st.integers(0, 4)) else None)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("mean", ["sequence", "token"])
@pytest.mark.parametrize("target", ["environment", "full"])
@settings(deadline=None, max_examples=15)
@given(
    items=st.lists(
        st.tuples(st.sampled_from([-1.5, 0.0, 0.7]), st.lists(observing_rows(), min_size=1, max_size=3)),
        min_size=1,
        max_size=5,
    ),
    budget=st.integers(9, 40),
)
def test_the_term_of_observations_is_added_and_does_not_depend_on_the_split(
    mean: str, target: str, items: list[tuple[float, list[Row]]], budget: int
) -> None:
    keys = {"observation_mean": mean, "observation_target": target}
    config = ObjectiveConfig.model_validate({"observation_coef": 0.3, **keys})
    batch = make_batch(items)
    rows = rows_of(batch, config)
    whole = step(rows, config, token_budget=WHOLE)
    shares = distribute([len(row.row.tokens_T) for row in rows], ranks=3)
    for parts in ([rows], [[rows[index] for index in share] for share in shares]):
        assert_same([step(part, config, token_budget=budget) for part in parts], whole)
    without = step(rows_of(batch, ObjectiveConfig()), ObjectiveConfig(), token_budget=WHOLE)
    table = table_of(2).requires_grad_()
    term = 0.3 * cross_entropy(batch, table, mean=mean, target=target)
    term.backward()
    assert table.grad is not None
    assert whole[0] == pytest.approx(without[0] + float(term.detach()), abs=1e-5)
    torch.testing.assert_close(whole[1], without[1] + table.grad, atol=1e-5, rtol=1e-4)


def cross_entropy(batch: Batch, table: torch.Tensor, *, mean: str, target: str) -> torch.Tensor:
    """ECHO's second term, written as its definition."""
    total, selected, rows = 0.0 * table.sum(), 0, 0
    for row in (row for item in batch.items for row in item.trajectory.rows if row.loss_mask_T.any()):
        rows += 1
        kinds = [] if row.kinds_T is None else row.kinds_T.tolist()
        bodies = [at for at, kind in enumerate(kinds) if kind in (TokenKind.OBSERVATION, TokenKind.WARNING)]
        chosen = [at for at in bodies if kinds[at] == TokenKind.OBSERVATION or target == "full"]
        logprobs = table.log_softmax(-1)
        sums = -sum((logprobs[int(row.tokens_T[at - 1]), int(row.tokens_T[at])] for at in chosen), 0.0 * table.sum())
        total = total + (sums / (len(bodies) + 0.001) if mean == "sequence" else sums)
        selected += len(chosen)
    return total / (max(rows, 1) if mean == "sequence" else selected + 0.001)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("name", OF_TOKENS)
@settings(deadline=None, max_examples=8)
@given(items=items_strategy)
def test_splitting_a_trajectory_into_rows_changes_nothing(name: str, items: list[tuple[float, list[Row]]]) -> None:
    """A row and, instead, one row per trained token (the same context, the other tokens masked)."""
    config = ObjectiveConfig(**SETTINGS[name])
    split = [(advantage, [part for row in rows for part in one_row_per_token(row)]) for advantage, rows in items]
    whole = step(rows_of(make_batch(items), config), config, token_budget=WHOLE)
    assert_same([step(rows_of(make_batch(split), config), config, token_budget=WHOLE)], whole)


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in OF_TOKENS])
@settings(deadline=None, max_examples=8)
@given(items=items_strategy, drift=st.floats(-0.5, 0.5))
def test_splitting_rows_of_one_ratio_changes_nothing(
    name: str, items: list[tuple[float, list[Row]]], drift: float
) -> None:
    """Where a row is a sequence, its parts must have the same mean ratio: here all tokens of the batch have one."""
    config = ObjectiveConfig(**SETTINGS[name])
    items = [(advantage, [with_ratio(row, drift) for row in rows]) for advantage, rows in items]
    split = [(advantage, [part for row in rows for part in one_row_per_token(row)]) for advantage, rows in items]
    whole = step(rows_of(make_batch(items), config), config, token_budget=WHOLE)
    assert_same([step(rows_of(make_batch(split), config), config, token_budget=WHOLE)], whole)


def with_ratio(row: Row, log_ratio: float) -> Row:
    """The same row, with behaviour log-probabilities that are lower than the model's by `log_ratio`."""
    logprobs = table_of(2).log_softmax(-1).numpy()
    behaviour = logprobs[row.tokens_T[:-1], row.tokens_T[1:]] - log_ratio
    return make_row(row.tokens_T.tolist(), row.loss_mask_T.tolist(), [0.0, *behaviour])


def one_row_per_token(row: Row) -> list[Row]:
    return [
        make_row(row.tokens_T[: at + 1].tolist(), [index == at for index in range(at + 1)], row.logprobs_T[: at + 1])
        for at in np.flatnonzero(row.loss_mask_T).tolist()
    ]


@given(items=items_strategy)
def test_each_trajectory_has_the_same_weight(items: list[tuple[float, list[Row]]]) -> None:
    rows = rows_of(make_batch(items), ObjectiveConfig())
    contributing = sum(adv != 0.0 and any(row.loss_mask_T.any() for row in parts) for adv, parts in items)
    total = sum(row.weight * int(row.row.loss_mask_T.sum()) for row in rows)
    assert total == pytest.approx(contributing / len(items))
