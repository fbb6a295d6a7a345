"""What is issued, what is accepted, how groups are sealed."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from pydantic import ValidationError

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.records import EvaluationRecord, FilterReason, GroupState, RolloutState
from headrace.buffer.trajectories.types import MAX_REWARD, Cause, ReceiptStatus, RolloutId
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
TRIO = BufferConfig(batch_size=6, group_size=3, max_staleness=1)


@pytest.fixture
def opened():
    buffer = cases.core()
    assert buffer.open_epoch(None, 0.0) == FIRST
    return buffer


def trio(**changes):
    """A buffer with one open group of three and its orders."""
    buffer = cases.core(TRIO.model_copy(update=changes))
    buffer.open_epoch(None, 0.0)
    return buffer, buffer.issue(3, FIRST, 0.0)


def test_an_impossible_config_is_refused():
    with pytest.raises(ValidationError, match='mode = "sync"'):
        BufferConfig(max_staleness=0)
    with pytest.raises(ValidationError, match="min_members"):
        BufferConfig(group_size=2, min_members=3)
    with pytest.raises(ValidationError, match="never fit"):
        BufferConfig(batch_size=2, group_size=8, max_staleness=1)
    with pytest.raises(ValidationError, match="Extra inputs"):
        BufferConfig(batchsize=2)
    assert BufferConfig(max_staleness=0, mode="sync").max_staleness == 0


def test_the_task_stream_is_a_repeatable_permutation_in_each_pass():
    stream, again = (TaskStream(cases.tasks(5), seed=1) for _ in range(2))
    assert sorted(stream.order(0)) == sorted(stream.order(1)) == [task.id for task in cases.tasks(5)]
    assert stream.order(0) != stream.order(1)
    assert (again.order(1), again.order(0)) == (stream.order(1), stream.order(0))
    with pytest.raises(ValueError, match="no training tasks"):
        TaskStream([], seed=0)


def test_the_inventory_limits_new_rollouts(opened):
    assert opened.admit() == 12
    orders = opened.issue(1000, FIRST, 0.0)
    assert len(orders) == 12
    assert opened.admit() == 0
    assert opened.issue(5, FIRST, 0.0) == ()
    for order in orders:
        opened.offer(cases.result(order, FIRST), 1.0)
    assert opened.admit() == 0, "sealed rollouts are in stock"
    cases.step(opened, FIRST)
    assert opened.admit() == 4


def test_a_group_can_be_issued_in_parts(opened):
    (first,) = opened.issue(1, FIRST, 0.0)
    (second,) = opened.issue(1, FIRST, 0.0)
    assert first.group_id == second.group_id
    assert first.task_id == second.task_id
    assert opened.state.next_ordinal == 1


def test_max_in_flight_limits_new_rollouts():
    buffer = cases.core(cases.SMALL.model_copy(update={"max_in_flight": 3}))
    buffer.open_epoch(None, 0.0)
    orders = buffer.issue(1000, FIRST, 0.0)
    assert len(orders) == 3
    buffer.offer(cases.result(orders[0], FIRST), 1.0)
    assert len(buffer.issue(1000, FIRST, 0.0)) == 1
    assert buffer.admit(in_flight=2) == 0, "its own three count"


def test_sync_mode_starts_only_rollouts_that_the_batch_needs():
    config = BufferConfig(batch_size=4, group_size=2, max_staleness=0, mode="sync")
    buffer = cases.core(config)
    buffer.open_epoch(None, 0.0)
    orders = buffer.issue(1000, FIRST, 0.0)
    assert len(orders) == 4
    for order in orders:
        buffer.offer(cases.result(order, FIRST), 1.0)
    record = buffer.take(FIRST, 1, 2.0)
    assert buffer.issue(1000, FIRST, 2.0) == (), "the next batch needs the next version"
    report = cases.StepReport(batch_id=record.batch_id, version=PolicyVersion(1, 1), skipped=False)
    buffer.commit(cases.lease_of(record), report, 3.0)
    assert buffer.issue(1000, FIRST, 3.0) == (), "the engines still serve the old version"
    assert len(buffer.issue(1000, PolicyVersion(1, 1), 3.0)) == 4


def test_each_result_is_accepted_once(opened):
    first, second = opened.issue(2, FIRST, 0.0)
    done = cases.result(first, FIRST)
    assert opened.offer(done, 1.0).status is ReceiptStatus.ACCEPTED
    opened.drain()
    assert opened.offer(done, 1.0).status is ReceiptStatus.DUPLICATE
    assert opened.offer(replace(done, attempt=2), 1.0).status is ReceiptStatus.UNKNOWN
    assert opened.offer(replace(done, rollout_id=RolloutId("g000009-0")), 1.0).status is ReceiptStatus.UNKNOWN
    assert opened.offer(replace(done, rollout_id=RolloutId("nonsense")), 1.0).status is ReceiptStatus.UNKNOWN
    assert {type(record).__name__ for record in opened.drain()} == {"CounterRecord"}, "refused offers only count"
    opened.offer(cases.ended(second, Cause.INFRA), 1.0)
    (again,) = opened.issue(1, FIRST, 2.0)
    assert (again.rollout_id, again.attempt) == (second.rollout_id, 2)
    assert opened.offer(cases.result(second, FIRST), 3.0).status is ReceiptStatus.LATE
    assert opened.status().counters["offers_late"] == 1
    assert opened.status().counters["offers_duplicate"] == 1
    assert opened.status().counters["offers_unknown"] == 3


def test_infra_failures_lead_to_new_attempts_until_the_member_is_poison(opened):
    """F19."""
    poisoned, other = opened.issue(2, FIRST, 0.0)
    for attempt in range(1, 4):
        assert opened.state.rollouts[poisoned.rollout_id].attempt == attempt
        cause = Cause.EVALUATOR if attempt == 2 else Cause.INFRA
        opened.offer(cases.ended(replace(poisoned, attempt=attempt), cause), 1.0)
        if attempt < 3:
            opened.issue(1, FIRST, 1.0)
    assert opened.state.rollouts[poisoned.rollout_id].state is RolloutState.POISON
    opened.offer(cases.result(other, FIRST), 2.0)
    group = opened.state.groups[other.group_id]
    assert group.state is GroupState.DROPPED, "one of two is below min_members"
    assert opened.state.rollouts[other.rollout_id].reason is FilterReason.GROUP_DROPPED
    assert opened.status().counters["groups_dropped"] == 1


def test_poison_members_are_left_out_of_the_group():
    """F19."""
    buffer, (first, second, third) = trio(max_attempts=1)
    buffer.offer(cases.result(first, FIRST, reward=1.0), 1.0)
    buffer.offer(cases.ended(second, Cause.INFRA), 1.0)
    buffer.offer(cases.result(third, FIRST, reward=0.0), 1.0)
    sealed = {
        state.rollout_id: state.advantage for state in buffer.state.rollouts.values() if state.advantage is not None
    }
    of_two = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert sealed == pytest.approx({first.rollout_id: of_two, third.rollout_id: -of_two})


def test_cancelled_and_abandoned_attempts_are_followed_by_new_ones(opened):
    first, second = opened.issue(2, FIRST, 0.0)
    opened.offer(cases.ended(first, Cause.CANCELLED), 1.0)
    assert opened.abandon([(second.rollout_id, second.attempt)], 1.0) == 1
    assert opened.abandon([(second.rollout_id, second.attempt)], 1.0) == 0
    assert opened.offer(cases.result(second, FIRST), 1.0).status is ReceiptStatus.LATE, "the dead worker still speaks"
    assert opened.state.rollouts[first.rollout_id].failures == 0
    assert opened.state.rollouts[second.rollout_id].failures == 0, "its worker's death is no failure of the rollout"
    orders = opened.issue(2, FIRST, 2.0)
    assert [order.attempt for order in orders] == [2, 2]
    assert opened.keep_in_flight((), 3.0) == 2
    assert [opened.state.rollouts[order.rollout_id].failures for order in orders] == [0, 0], "no fault of theirs"


def test_a_failure_has_no_reward_whatever_the_worker_says(opened):
    """F19."""
    (order,) = opened.issue(1, FIRST, 0.0)
    failed = cases.ended(order, Cause.INFRA)
    opened.offer(replace(failed, outcome=replace(failed.outcome, reward=0.0, trainable=True)), 1.0)
    attempt = opened.state.attempts[order.rollout_id]
    assert (attempt.reward, attempt.trainable, opened.state.rollouts[order.rollout_id].reward) == (None, False, None)


@pytest.mark.parametrize(
    "reward", [math.nan, math.inf, -math.inf, 1e200, -1.1 * MAX_REWARD, 10**400, "1", None, 1j, Decimal(1)]
)
def test_an_unbounded_reward_is_an_infra_failure(opened, reward):
    (order,) = opened.issue(1, FIRST, 0.0)
    done = cases.result(order, FIRST)
    assert opened.offer(replace(done, outcome=replace(done.outcome, reward=reward)), 1.0).status == "accepted"
    attempt = opened.state.attempts[order.rollout_id]
    assert (attempt.cause, attempt.reward, attempt.solved) == (Cause.INFRA, None, False)
    assert "malformed result: the reward" in attempt.detail
    opened.record_evaluation(
        replace(done, rollout_id=RolloutId("eval-0"), outcome=replace(done.outcome, reward=reward)),
        order.task_id,
        "base",
        FIRST,
        1.0,
    )
    [evaluation] = [record for record in opened.drain() if isinstance(record, EvaluationRecord)]
    assert (evaluation.cause, evaluation.reward, evaluation.solved) == (Cause.INFRA, None, False)


@pytest.mark.parametrize("reward", [-MAX_REWARD, MAX_REWARD, 0, -3, True, np.float32(0.5), np.int64(7)])
def test_any_number_within_the_bound_is_a_reward(opened, reward):
    (order,) = opened.issue(1, FIRST, 0.0)
    opened.offer(cases.result(order, FIRST, reward=reward, solved=False), 1.0)
    kept = opened.state.attempts[order.rollout_id].reward
    assert (kept, type(kept)) == (float(reward), float)


@pytest.mark.parametrize(("cause", "solved"), [(Cause.SOLVED, False), (Cause.FAILED, True), (Cause.INVALID, True)])
def test_a_verdict_that_contradicts_the_cause_is_an_infra_failure(opened, cause, solved):
    (order,) = opened.issue(1, FIRST, 0.0)
    done = cases.result(order, FIRST)
    opened.offer(replace(done, outcome=replace(done.outcome, cause=cause, solved=solved)), 1.0)
    attempt = opened.state.attempts[order.rollout_id]
    assert (attempt.cause, attempt.reward) == (Cause.INFRA, None)


def test_rollouts_over_the_bound_are_listed_for_cancellation(opened):
    old = opened.issue(2, FIRST, 0.0)
    new = opened.issue(2, PolicyVersion(1, 1), 0.0)
    assert opened.to_cancel(PolicyVersion(1, 2)) == ()
    assert set(opened.to_cancel(PolicyVersion(1, 3))) == {(order.rollout_id, 1) for order in old}
    assert len(opened.to_cancel(PolicyVersion(1, 4))) == len(old) + len(new)


def test_a_group_is_sealed_only_once_every_member_has_finished():
    buffer, (first, second, third) = trio()
    buffer.offer(cases.result(first, FIRST), 1.0)
    buffer.offer(cases.result(second, FIRST, reward=0.0), 1.0)
    assert buffer.state.groups[first.group_id].state is GroupState.OPEN
    assert buffer.inventory().waiting == 2
    buffer.offer(cases.result(third, FIRST, reward=0.0), 1.0)
    assert buffer.state.groups[first.group_id].state is GroupState.SEALED
    assert buffer.inventory().sealed == 3


@pytest.mark.parametrize(("rule", "state"), [("keep", RolloutState.SEALED), ("filter", RolloutState.FILTERED)])
def test_groups_without_variance_are_kept_or_filtered_as_configured(rule, state):
    buffer, orders = trio(zero_variance=rule)
    for order in orders:
        buffer.offer(cases.result(order, FIRST, reward=1.0), 1.0)
    assert {buffer.state.rollouts[order.rollout_id].state for order in orders} == {state}
    assert buffer.status().counters["groups_zero_variance"] == 1


def test_results_without_trained_tokens_count_only_in_the_baseline():
    buffer, (first, second, third) = trio(advantage="leave_one_out")
    buffer.offer(cases.result(first, reward=0.0), 1.0)
    buffer.offer(cases.result(second, FIRST, reward=0.0, trainable=False), 1.0)
    buffer.offer(cases.result(third, FIRST, reward=1.0), 1.0)
    assert buffer.state.rollouts[first.rollout_id].reason is FilterReason.NO_TOKENS
    assert buffer.state.rollouts[second.rollout_id].reason is FilterReason.NOT_TRAINABLE
    assert buffer.state.rollouts[third.rollout_id].advantage == pytest.approx(1.0)


def test_a_contradictory_result_is_an_infra_failure(opened):
    row = cases.trajectory(FIRST).rows[0]
    broken = (
        replace(row, loss_mask_T=row.loss_mask_T[:-1]),
        replace(row, versions=()),
        replace(row, versions=(replace(row.versions[0], end=99),)),
        replace(row, versions=(replace(row.versions[0], version=PolicyVersion(7, 0)),)),
        replace(row, logprobs_T=np.full_like(row.logprobs_T, np.nan)),
    )
    for order, bad in zip(opened.issue(5, FIRST, 0.0), broken, strict=True):
        done = cases.result(order, FIRST)
        done = replace(done, trajectory=replace(done.trajectory, rows=(bad,)))
        assert opened.offer(done, 1.0).status is ReceiptStatus.ACCEPTED
        attempt = opened.state.attempts[order.rollout_id]
        assert attempt.cause is Cause.INFRA
        assert "malformed" in attempt.detail
        assert opened.state.rollouts[order.rollout_id].reward is None
    (order,) = [order for order in opened.issue(9, FIRST, 2.0) if order.attempt == 1][:1]
    done = cases.result(order, FIRST)
    opened.offer(replace(done, outcome=replace(done.outcome, reward=None)), 3.0)
    assert opened.state.attempts[order.rollout_id].cause is Cause.INFRA


def test_an_evaluation_counts_its_sampled_tokens_although_none_are_trained(opened):
    (order,) = opened.issue(1, FIRST, 0.0)
    done = cases.result(order, FIRST)
    row = done.trajectory.rows[0]
    masked = replace(row, loss_mask_T=np.zeros_like(row.loss_mask_T))
    done = replace(done, rollout_id=RolloutId("eval-0"), trajectory=replace(done.trajectory, rows=(masked,)))
    opened.record_evaluation(done, order.task_id, "base", FIRST, 1.0)
    [kept] = [record for record in opened.drain() if isinstance(record, EvaluationRecord)]
    assert [(part.version, part.tokens) for part in kept.sampled] == [(FIRST, 6)]


def test_evaluations_are_recorded_once(opened):
    (order,) = opened.issue(1, FIRST, 0.0)
    done = replace(cases.result(order, FIRST), rollout_id=RolloutId("eval-0"))
    receipts = [opened.record_evaluation(done, order.task_id, "base", FIRST, 1.0).status for _ in range(2)]
    assert receipts == [ReceiptStatus.ACCEPTED, ReceiptStatus.DUPLICATE]
    bad = replace(done, rollout_id=RolloutId("eval-1"), trajectory=cases.trajectory(PolicyVersion(9, 0)))
    opened.record_evaluation(bad, order.task_id, "base", FIRST, 1.0)
    causes = {record.key[0]: record.cause for record in opened.drain() if isinstance(record, EvaluationRecord)}
    assert causes == {"eval-0": Cause.SOLVED, "eval-1": Cause.INFRA}
    assert opened.status().evaluations == 2
    assert opened.inventory().waiting == 0
