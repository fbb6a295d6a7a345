"""Credit of single turns: values normalised over the group, kept through restarts, checked by `verify`, and trained."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from headrace.actors.training.learner import shuffle_rewards
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.records import FilterReason, RolloutState
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.step_scores import Credit, ScoredStep, StepScores, TokenSpan
from headrace.buffer.trajectories.types import (
    Batch,
    BatchItem,
    BatchLease,
    Cause,
    GroupId,
    RolloutId,
    RolloutOrder,
    RolloutResult,
)
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.micro_batches import collate, weighted_rows
from headrace.policies.learners.objectives.config import ObjectiveConfig
from support import replay_cases as cases
from support.objective_cases import objective_of

FOUR = cases.SMALL.model_copy(update={"group_size": 4, "batch_size": 4})
V = PolicyVersion(1, 0)


def scores(
    outcome: float, by_turn: Mapping[int, float], credit: Credit = Credit.STEPS, coefficient: float = 1.0
) -> StepScores:
    """Scores of an attempt with one row, in which turn k has the tokens [2 + 6 (k - 1), 2 + 6 k)."""
    steps = tuple(
        ScoredStep(turn, score, (TokenSpan(0, 6 * turn - 4, 6 * turn + 2),)) for turn, score in by_turn.items()
    )
    return StepScores(credit=credit, outcome=outcome, coefficient=coefficient, steps=steps)


def result(order: RolloutOrder, given: StepScores, turns: int = 3) -> RolloutResult:
    return replace(cases.result(order, *[V] * turns, reward=given.reward, solved=given.outcome > 0), scores=given)


GROUP = (
    scores(1.0, {1: 1.0, 2: 0.0}),
    scores(-1.0, {1: 1.0, 2: 1.0}),
    scores(-1.0, {1: -1.0, 3: 0.5}),
    scores(1.0, {}),
)
"""Values of turn 1: 2, 0, -2; of turn 2: 1, 0; of turn 3: -0.5."""
ROOT = (8 / 3) ** 0.5
EXPECTED = ({1: 2 / ROOT, 2: 1.0}, {1: 0.0, 2: -1.0}, {1: -2 / ROOT, 3: -0.5}, {})


def test_turns_are_normalised_over_the_members_with_a_score_for_them() -> None:
    buffer = cases.core(FOUR)
    version = buffer.open_epoch(None, 0.0)
    orders = buffer.issue(4, version, 0.0)
    for order, given in zip(orders, GROUP, strict=True):
        buffer.offer(result(order, given), 1.0)
    members = [buffer.state.rollouts[order.rollout_id] for order in orders]
    assert [member.reward for member in members] == [1.0, -1.0, -1.0, 1.0]
    for member, expected in zip(members, EXPECTED, strict=True):
        assert dict(member.turn_advantages or {}) == pytest.approx(expected, abs=1e-5)


def test_groups_with_equal_outcomes_are_trained_if_their_steps_differ() -> None:
    config = FOUR.model_copy(update={"zero_variance": "filter"})
    for turn_scores, state in (((1.0, -1.0, 1.0, 1.0), RolloutState.SEALED), ((1.0,) * 4, RolloutState.FILTERED)):
        buffer = cases.core(config)
        orders = buffer.issue(4, buffer.open_epoch(None, 0.0), 0.0)
        for order, score in zip(orders, turn_scores, strict=True):
            buffer.offer(result(order, scores(-1.0, {1: score})), 1.0)
        members = [buffer.state.rollouts[order.rollout_id] for order in orders]
        assert {member.state for member in members} == {state}
        if state is RolloutState.FILTERED:
            assert {member.reason for member in members} == {FilterReason.ZERO_VARIANCE}


def test_scores_that_cannot_belong_to_the_attempt_make_it_an_infra_failure() -> None:
    twice = (ScoredStep(1, 1.0, (TokenSpan(0, 2, 8),)), ScoredStep(2, 1.0, (TokenSpan(0, 7, 9),)))
    same = (ScoredStep(1, 1.0, ()), ScoredStep(1, 0.0, ()))
    good = scores(1.0, {1: 1.0})
    for wrong, why in (
        (replace(good, steps=(ScoredStep(1, float("nan"), ()),)), "nan is not a finite number"),
        (replace(good, steps=(ScoredStep(1, 1.0, (TokenSpan(0, 0, 4),)),)), "but are not trained"),
        (replace(good, steps=(ScoredStep(1, 1.0, (TokenSpan(1, 2, 4),)),)), "of row 1 are out of range"),
        (replace(good, steps=(ScoredStep(1, 1.0, (TokenSpan(0, 2, 99),)),)), "are out of range"),
        (replace(good, steps=twice), "belong to two scored steps"),
        (replace(good, steps=same), "two scores have the same turn"),
        (replace(good, outcome=0.5), "its outcome and scores give 0.5"),
        (replace(good, credit=Credit.REWARD), "its outcome and scores give 2.0"),
        (replace(good, coefficient=1e7), "the coefficient 1e"),
    ):
        buffer = cases.core(FOUR)
        (order,) = buffer.issue(1, buffer.open_epoch(None, 0.0), 0.0)
        buffer.offer(replace(result(order, good), scores=wrong), 1.0)
        attempt = buffer.state.attempts[order.rollout_id]
        assert (attempt.cause, attempt.reward, attempt.scores) == (Cause.INFRA, None, None)
        assert why in attempt.detail


@for_all(
    st.lists(
        st.tuples(st.integers(0, 2**31), st.floats(-1e6, 1e6), st.lists(st.tuples(*[st.integers(0, 2**31)] * 3))),
        max_size=5,
    ),
    st.sampled_from(Credit),
)
def test_stored_scores_are_read_as_they_were(
    steps: list[tuple[int, float, list[tuple[int, int, int]]]], credit
) -> None:
    given = StepScores(
        credit=credit,
        outcome=-1.0,
        coefficient=0.25,
        steps=tuple(ScoredStep(turn, score, tuple(TokenSpan(*one) for one in spans)) for turn, score, spans in steps),
    )
    assert StepScores.from_json(given.to_json()) == given


async def run(run_dir: Path, credit: Credit) -> Batch:
    """A run with one group, the second member of which is issued again after the group was sealed."""
    async with await ReplayStore.open(run_dir, FOUR, cases.tasks(), run_id="steps", seed=3) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(4, version)
        given = [replace(one, credit=credit) for one in GROUP]
        await store.offer_many([result(order, one) for order, one in zip(orders, given, strict=True)])
    # Everything is read from the disk again.
    async with await ReplayStore.open(run_dir, FOUR, cases.tasks(), run_id="steps", seed=3) as store:
        version = await store.open_epoch(None)
        batch = await store.take(version, version.epoch, timeout_s=1.0)
        assert batch is not None
        return batch


async def test_a_batch_has_the_advantages_of_turns_after_a_restart(tmp_path: Path) -> None:
    batch = await run(tmp_path, Credit.STEPS)
    assert verify(tmp_path).clean
    items = sorted(batch.items, key=lambda item: item.rollout_id)
    for item, expected in zip(items, EXPECTED, strict=True):
        advantages_T = item.row_advantages(0)
        if not expected:
            assert advantages_T is None
            continue
        assert advantages_T is not None
        for turn in (1, 2, 3):
            tokens = advantages_T[6 * turn - 4 : 6 * turn + 2]
            assert tokens == pytest.approx(expected.get(turn, item.advantage), abs=1e-5)


@pytest.mark.parametrize(
    ("credit", "statement", "problem"),
    [
        (
            Credit.REWARD,
            "UPDATE attempts SET scores = replace(scores, '[1,1.0', '[1,0.5') WHERE rollout_id LIKE '%-0'",
            "g000000-0 attempt 1 has reward 1.5, but its outcome and the scores of its steps give 1.25",
        ),
        (
            Credit.STEPS,
            "UPDATE attempts SET scores = replace(scores, '[1,1.0', '[1,0.5') WHERE rollout_id LIKE '%-0'",
            "g000000-0 counts {1: 2.0, 2: 1.0} for its turns, not its first result's scores",
        ),
        (
            Credit.STEPS,
            "UPDATE rollouts SET turn_advantages = '[[1,0.5]]' WHERE member = 2",
            "g000000-2 has advantages {1: 0.5} of turns, but its group's scores give",
        ),
        (
            Credit.STEPS,
            "UPDATE rollouts SET turn_advantages = NULL WHERE member = 1",
            "g000000-1 has advantages {} of turns, but its group's scores give",
        ),
    ],
)
async def test_verify_computes_rewards_and_turns_from_the_scores(
    tmp_path: Path, credit: Credit, statement: str, problem: str
) -> None:
    await run(tmp_path, credit)
    assert verify(tmp_path).clean
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as database:
        assert database.execute(statement).rowcount == 1
        database.commit()
    assert any(one.startswith(problem) for one in verify(tmp_path).problems)


def test_a_member_that_is_issued_again_is_compared_with_the_group_as_it_was_sealed() -> None:
    buffer = cases.core(FOUR)
    version = buffer.open_epoch(None, 0.0)
    orders = buffer.issue(4, version, 0.0)
    for order, given in zip(orders, GROUP, strict=True):
        buffer.offer(result(order, given), 1.0)
    assert buffer.operators.retry_lost({orders[1].rollout_id: "its trajectory is missing"}, 2.0)
    assert buffer.state.rollouts[orders[1].rollout_id].turn_advantages is None
    (again,) = buffer.issue(1, version, 3.0)
    # Turn 4 is in no bucket, turn 3 was one of a single member; turn 1 is as far out as any of three values can be.
    buffer.offer(result(again, scores(9.0, {1: 1.0, 3: -1.0, 4: 1.0}), turns=4), 4.0)
    member = buffer.state.rollouts[orders[1].rollout_id]
    assert dict(member.turn_advantages or {}) == pytest.approx({1: 2**0.5, 3: 8.0, 4: 10.0})
    assert member.first_values == {1: 0.0, 2: 0.0}


def batch_of(*items: BatchItem) -> Batch:
    return Batch(lease=BatchLease(batch_id="b", epoch=1), version=V, items=items)


def item(number: int, turns: Mapping[int, float], given: StepScores, advantage: float = 0.25) -> BatchItem:
    return BatchItem(
        rollout_id=RolloutId(f"g-{number}"),
        group_id=GroupId("g"),
        attempt=1,
        reward=1.0,
        advantage=advantage,
        staleness=0,
        trajectory=cases.trajectory(V, V, V, seed=number),
        scores=given,
        turn_advantages=turns,
    )


def test_each_token_is_trained_with_the_advantage_of_its_turn() -> None:
    import torch

    one = item(1, {1: 2.0, 3: -1.0}, scores(1.0, {1: 1.0, 3: 0.5}))
    plain = replace(one, scores=None, turn_advantages={}, rollout_id=RolloutId("g-2"), advantage=0.5)
    config = ObjectiveConfig()
    rows = weighted_rows(batch_of(one, plain), objective_of(config), config)
    micro_batch = collate(rows, torch.device("cpu"))
    expected = [2.0] * 6 + [0.25] * 6 + [-1.0] * 6 + [0.5] * 18
    assert micro_batch.advantages_N.tolist() == expected


def test_rows_whose_turns_alone_have_advantages_are_computed() -> None:
    config = ObjectiveConfig()
    nothing = item(1, {1: 0.0}, scores(1.0, {1: 1.0}), advantage=0.0)
    something = replace(nothing, turn_advantages={1: 0.5})
    assert not weighted_rows(batch_of(nothing), objective_of(config), config)
    assert len(weighted_rows(batch_of(something), objective_of(config), config)) == 1


def test_the_control_shuffles_the_advantages_of_turns_too() -> None:
    items = tuple(
        item(number, {1: float(number)}, scores(1.0, {1: 1.0}), advantage=float(number)) for number in range(8)
    )
    shuffled = shuffle_rewards(batch_of(*items), seed=0)
    given = [one.turn_advantages[1] for one in shuffled.items]
    assert given == [one.advantage for one in shuffled.items]
    assert sorted(given) == list(range(8))
    assert given != list(range(8))
    for number, one in enumerate(shuffled.items):
        advantages_T = one.row_advantages(0)
        assert advantages_T is not None
        assert np.all(advantages_T == given[number])
