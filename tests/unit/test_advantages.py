"""Advantages of each kind, through the core, against numpy and against complete groups of the same rewards."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.buffer.core.advantages import RewardSpread, advantage, deviation_sum, group_scale
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.records import GroupState, RolloutState
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.trajectories.types import Cause
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
REWARDS = (0.25, 1.0, 0.0, 0.5, 0.125, 1.0)
ONE_FAILURE = (0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)


def buffer_of(size, **settings):
    """A buffer with groups of one task."""
    config = BufferConfig(**{"group_size": size, "batch_size": 1 << 12, **settings})
    buffer = ReplayBuffer(config, TaskStream(cases.tasks(1), seed=3))
    buffer.open_epoch(None, 0.0)
    return buffer


def finish(buffer, order, reward, now=1.0):
    buffer.offer(cases.result(order, FIRST, reward=reward), now)


def run_group(buffer, rewards, count=None):
    """Open a group and finish its first `count` members (all of them by default) with these rewards."""
    orders = buffer.issue(len(rewards), FIRST, 0.0)
    for order, reward in list(zip(orders, rewards, strict=True))[:count]:
        finish(buffer, order, reward)
    return orders


def advantages(buffer, orders):
    return [buffer.state.rollouts[order.rollout_id].advantage for order in orders]


def published(kind, rewards):
    """In float64, with numpy."""
    R = np.asarray(rewards, dtype=np.float64)
    others = (R.sum() - R) / (len(R) - 1)
    return {
        "grpo": (R - R.mean()) / (R.std(ddof=1) + 1e-6),
        "grpo_no_std": R - R.mean(),
        "leave_one_out": R - others,
    }[kind]


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "leave_one_out"])
@pytest.mark.parametrize("rewards", [REWARDS, ONE_FAILURE, (1.0, 0.0), (-3.0, 500.0, 2.5)])
def test_complete_groups_have_the_published_advantages(kind, rewards):
    buffer = buffer_of(len(rewards), advantage=kind)
    got = advantages(buffer, run_group(buffer, rewards))
    np.testing.assert_allclose(got, published(kind, rewards), rtol=0, atol=1e-9)


def test_a_failure_weighs_as_much_in_an_early_group_as_in_a_complete_one():
    """The failure of 7 of 8, after a group like it and nine flat ones."""
    buffer, whole = buffer_of(8, rule="count(7)"), buffer_of(8)
    assert advantages(whole, run_group(whole, ONE_FAILURE))[0] == pytest.approx(-2.475, abs=0.005)
    for rewards in (ONE_FAILURE, *[[1.0] * 8] * 9):
        run_group(buffer, rewards)
    orders = run_group(buffer, ONE_FAILURE, count=7)
    group = buffer.state.group_of(orders[0].rollout_id)
    assert (group.state, group.complete_before) == (GroupState.SEALED, None)
    assert advantages(buffer, orders)[0] == pytest.approx(-2.475, abs=0.005)


def test_a_late_failure_weighs_as_much_as_an_early_one():
    buffer = buffer_of(8, rule="count(7)")
    run_group(buffer, ONE_FAILURE)
    orders = run_group(buffer, ONE_FAILURE[::-1], count=7)
    finish(buffer, orders[7], 0.0, 9.0)
    assert advantages(buffer, orders)[7] == pytest.approx(-7 / 8 / math.sqrt(1 / 8), rel=1e-5)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "leave_one_out"])
def test_advantages_ignore_an_offset_of_rewards_and_grpo_their_unit(kind):
    """In early groups too: there is no smallest scale in units of reward."""

    def run(unit, offset):
        buffer = buffer_of(6, advantage=kind, rule="count(4)")
        run_group(buffer, [unit * reward + offset for reward in REWARDS])
        orders = run_group(buffer, [unit * reward + offset for reward in REWARDS[::-1]], count=4)
        return np.array(advantages(buffer, orders)[:4])

    plain = run(1.0, 0.0)
    np.testing.assert_allclose(run(1.0, 5.0), plain, atol=1e-9)
    unit = 1.0 if kind == "grpo" else 0.02
    np.testing.assert_allclose(run(0.02, 0.0), unit * plain, rtol=2e-4)


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=12),
    history=st.lists(st.floats(-10, 10), min_size=2, max_size=12),
)
def test_no_advantage_exceeds_that_of_a_complete_group(rewards, history):
    """After a history of almost equal rewards, a member of an early group has at most the weight that one of n can have
    in a complete group."""
    squares = float(np.var(history) * len(history))
    spread = RewardSpread(grpo_square_sum=squares, grpo_deviation_sum=deviation_sum(history))
    n = len(rewards)
    scale = group_scale("grpo", None, members=n, own=RewardSpread(), pooled=spread)
    for own in (0, n - 1):
        baseline = (math.fsum(rewards) - rewards[own]) / (n - 1)
        value = advantage("grpo", rewards[own], baseline, scale, members=n)
        assert abs(value) <= (n - 1) / math.sqrt(n)
    assert max(abs(published("grpo", rewards))) <= (n - 1) / math.sqrt(n) + 1e-9, "Samuelson's inequality"


def test_a_member_issued_again_is_weighed_by_the_scale_of_history_if_its_group_was_flat():
    buffer = buffer_of(4, batch_size=4, max_staleness=2)
    run_group(buffer, (1.0, 1.0, 0.0, 1.0))
    _, version = cases.step(buffer, FIRST)
    for _ in range(2):
        cases.fill(buffer, version, limit=4, rewards=(0.5,))
        _, version = cases.step(buffer, version)
    orders = buffer.issue(4, version, 0.0)
    for order in orders:
        finish(buffer, order, 1.0)
    assert set(advantages(buffer, orders)) == {0.0}
    assert buffer.take(version, 1, 4.0) is None, "sampled by the first version, they are over the bound"
    again = buffer.issue(1, version, 5.0)[0]
    assert (again.rollout_id, again.attempt) == (orders[0].rollout_id, 2)
    finish(buffer, again, 0.0, 6.0)
    assert advantages(buffer, [again]) == [pytest.approx(-3 / 4 / 0.5, rel=1e-5)]


@pytest.mark.parametrize("kind", ["rloo", "centered", "grpo_first_round"])
def test_another_kind_is_refused_with_those_that_exist(kind):
    assert BufferConfig().advantage == "grpo"
    with pytest.raises(ValidationError, match=r"advantage\n.*'grpo', 'grpo_no_std' or 'leave_one_out'"):
        BufferConfig(advantage=kind)


def test_members_that_became_poison_are_not_counted():
    buffer = buffer_of(3, max_attempts=1)
    first, second, third = buffer.issue(3, FIRST, 0.0)
    finish(buffer, first, 1.0)
    buffer.offer(cases.ended(second, Cause.INFRA), 1.0)
    finish(buffer, third, 0.0)
    assert buffer.state.rollouts[second.rollout_id].state is RolloutState.POISON
    np.testing.assert_allclose(advantages(buffer, (first, third)), published("grpo", (1.0, 0.0)), atol=1e-9)
