"""Acceptance rules: what they say, when groups are sealed by them, what becomes of those left behind."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from pydantic import ValidationError

from headrace.buffer.core.acceptance import ALWAYS, NEVER, GroupView, every_member, parse_rule
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.records import GroupState, RolloutState, Snapshot
from headrace.buffer.trajectories.types import Cause, ReceiptStatus
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
VIEW = GroupView(size=8, finished=6, running=2, opened_at_s=100.0, last_finished_at_s=160.0)


def quartet(**changes):
    """A buffer with one open group of four, opened at 0 s, and its orders."""
    config = BufferConfig(
        **({"batch_size": 8, "group_size": 4, "max_staleness": 2, "advantage": "leave_one_out"} | changes)
    )
    buffer = cases.core(config)
    buffer.open_epoch(None, 0.0)
    return buffer, buffer.issue(4, FIRST, 0.0)


def finish(buffer, order, now, reward=1.0):
    return buffer.offer(cases.result(order, FIRST, reward=reward), now).status


def member(buffer, order):
    return buffer.state.rollouts[order.rollout_id]


def scale_of(buffer, orders):
    """The scale that all these members have."""
    (scale,) = {member(buffer, order).scale for order in orders}
    return scale


def states(buffer, orders):
    return [member(buffer, order).state for order in orders]


@pytest.mark.parametrize(
    ("text", "since"),
    [
        ("all", NEVER),
        ("all()", NEVER),
        ("count(6)", ALWAYS),
        ("count(7)", NEVER),
        ("at_least(6)", ALWAYS),
        ("fraction(0.75)", ALWAYS),
        ("fraction(0.76)", NEVER),
        ("deadline(900)", 1000.0),
        ("grace(120)", 280.0),
        ("expiring(1)", NEVER),
        ("fraction(0.75) & grace(120)", 280.0),
        ("count(7) | deadline(900)", 1000.0),
        ("count(7) & deadline(900)", NEVER),
        ("all | count(7) & deadline(1) | grace(0.5)", 160.5),
        ("(all | count(6)) & deadline(1)", 101.0),
    ],
)
def test_a_rule_returns_the_earliest_time_at_which_it_accepts(text, since):
    rule = parse_rule(text)
    assert rule.since(VIEW) == since
    assert parse_rule(rule.text).since(VIEW) == since, "its own text means the same"
    if math.isfinite(since):
        assert not rule(VIEW, since - 0.1)
        assert rule(VIEW, since)


def test_rules_handle_edge_cases():
    assert every_member().since(replace(VIEW, running=0)) == ALWAYS
    expiring = parse_rule("all | expiring(1)")
    assert expiring.expires
    assert not parse_rule("all | grace(1)").expires
    assert [expiring.since(replace(VIEW, updates_left=left)) for left in (2, 1, 0)] == [NEVER, ALWAYS, ALWAYS]
    assert parse_rule("fraction(0.28)").since(replace(VIEW, size=25, finished=7)) == ALWAYS
    assert parse_rule("grace(1)").since(replace(VIEW, finished=0)) == NEVER


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("count(9)", "count\\(9\\) can never be met with group_size = 8"),
        ("all | at_least(9)", "can never be met"),
        ("count(0)", "at least 1"),
        ("count(2.5)", "needs a whole number"),
        ("count(1e999)", "needs a whole number"),
        ("fraction(0)", "above 0 and at most 1"),
        ("fraction(1.1)", "above 0 and at most 1"),
        ("deadline(0)", "seconds above 0"),
        ("grace(1e999)", "seconds above 0"),
        ("expiring(4)", "always holds with max_staleness = 4"),
        ("expiring(0.5)", "needs a whole number"),
        ("most", "'most' is not a rule"),
        ("count(True)", "is not a rule"),
        ("count(-1)", "is not a rule"),
        ("count(6, 7)", "is not a rule"),
        ("all + all", "is not a rule"),
        ("__import__('os').system('true')", "is not a rule"),
        ("", "is not valid"),
        ("all |", "is not valid"),
        ("(" * 150 + "all", "is not valid"),
        ("all | " * 60 + "all", "363 characters"),
        ("all\0", "is not valid"),
    ],
)
def test_an_invalid_or_unsatisfiable_rule_is_refused(text, message):
    with pytest.raises(ValidationError, match=message):
        BufferConfig(rule=text)


def test_members_left_behind_are_carried_with_fixed_baselines():
    buffer, orders = quartet(rule="count(3)")
    for now, (order, reward) in enumerate(zip(orders[:3], (1.0, 0.0, 0.5), strict=True), start=1):
        finish(buffer, order, float(now), reward)
    group = buffer.state.groups[orders[0].group_id]
    assert (group.state, group.rule, group.ended_at_s) == (GroupState.SEALED, "count(3)", 3.0)
    assert states(buffer, orders) == [*[RolloutState.SEALED] * 3, RolloutState.IN_FLIGHT]
    baselines = [member(buffer, order).baseline for order in orders]
    assert baselines == [0.25, 0.75, 0.5, 0.5], "the first two of the others"
    assert [member(buffer, order).late for order in orders] == [False, False, False, True]
    assert group.complete_before is None
    assert finish(buffer, orders[3], 50.0, 0.75) is ReceiptStatus.ACCEPTED
    assert states(buffer, orders)[3] is RolloutState.SEALED
    assert member(buffer, orders[3]).advantage == 0.25
    assert [member(buffer, order).baseline for order in orders] == baselines
    assert buffer.state.groups[group.group_id].complete_before == 2
    assert buffer.state.task(orders[0].task_id).reward_sum == 2.25


def test_a_late_member_is_issued_again_and_left_out_once_it_is_poison():
    buffer, orders = quartet(rule="count(3)", max_attempts=2)
    for order in orders[:3]:
        finish(buffer, order, 1.0, float(order is orders[0]))
    buffer.offer(cases.ended(orders[3], Cause.INFRA), 2.0)
    assert states(buffer, orders)[3] is RolloutState.PENDING
    again = buffer.issue(1, FIRST, 3.0)[0]
    assert (again.rollout_id, again.attempt) == (orders[3].rollout_id, 2)
    buffer.offer(cases.ended(again, Cause.INFRA), 4.0)
    assert states(buffer, orders)[3] is RolloutState.POISON
    assert buffer.state.groups[orders[0].group_id].complete_before == 2, "poison is not left out for being slow"


def test_aborted_members_are_cancelled_until_their_result_arrives():
    buffer, orders = quartet(rule="count(2)", unfinished="abort")
    finish(buffer, orders[0], 1.0)
    buffer.offer(cases.ended(orders[3], Cause.INFRA), 1.0)
    finish(buffer, orders[1], 2.0)
    assert states(buffer, orders)[2:] == [RolloutState.CANCELLED] * 2
    assert buffer.inventory().in_flight == buffer.inventory().pending == 0
    running = (orders[2].rollout_id, 1)
    assert buffer.to_cancel(FIRST) == (running,)
    again = cases.core(buffer.config, Snapshot(records=buffer.drain()))
    for one in (buffer, again):
        assert one.to_cancel(FIRST) == (running,)
        assert one.keep_in_flight([running], 3.0) == 0
        assert one.to_cancel(FIRST) == (running,), "its dispatcher carries it still"
        assert finish(one, orders[2], 3.0) is ReceiptStatus.LATE
        assert one.to_cancel(FIRST) == ()
        assert states(one, orders)[2] is RolloutState.CANCELLED
    assert buffer.status().counters["rollouts_cancelled"] == 2
    assert buffer.state.groups[orders[0].group_id].complete_before is None


def test_an_aborted_attempt_without_a_runner_is_forgotten():
    buffer, orders = quartet(rule="count(2)", unfinished="abort")
    for order in orders[:2]:
        finish(buffer, order, 1.0)
    assert len(buffer.to_cancel(FIRST)) == 2
    assert buffer.abandon([(orders[2].rollout_id, 1)], 2.0) == 0
    assert buffer.keep_in_flight([], 2.0) == 0
    assert buffer.to_cancel(FIRST) == ()


def test_fewer_than_min_members_are_never_sealed_early():
    buffer, orders = quartet(rule="deadline(10)", min_members=3)
    finish(buffer, orders[0], 1.0)
    finish(buffer, orders[1], 2.0)
    assert buffer.due_at() is None
    buffer.tick(1000.0)
    assert buffer.state.groups[orders[0].group_id].state is GroupState.OPEN
    finish(buffer, orders[2], 1001.0)
    assert buffer.state.groups[orders[0].group_id].state is GroupState.SEALED


def test_rules_with_timers_report_when_they_are_due():
    buffer, orders = quartet(rule="grace(30) | deadline(100)")
    finish(buffer, orders[0], 5.0)
    finish(buffer, orders[1], 10.0)
    assert buffer.due_at() == 40.0
    finish(buffer, orders[2], 39.0)
    assert buffer.due_at() == 69.0
    buffer.tick(68.9)
    assert member(buffer, orders[2]).state is RolloutState.WAITING
    assert finish(buffer, orders[3], 70.0, 0.0) is ReceiptStatus.ACCEPTED
    assert [member(buffer, order).late for order in orders] == [False, False, False, True], "it came after the grace"
    assert buffer.due_at() is None


@pytest.mark.parametrize("call", ["issue", "take", "tick", "abandon"])
def test_any_call_with_a_time_argument_seals_due_groups(call):
    buffer, orders = quartet(rule="deadline(100)")
    for order in orders[:2]:
        finish(buffer, order, 1.0)
    {
        "issue": lambda: buffer.issue(1, FIRST, 100.0),
        "take": lambda: buffer.take(FIRST, 1, 100.0),
        "tick": lambda: buffer.tick(100.0),
        "abandon": lambda: buffer.abandon([], 100.0),
    }[call]()
    assert states(buffer, orders[:2]) == [RolloutState.SEALED] * 2


def test_with_a_deadline_baselines_are_over_members_finished_by_the_deadline():
    buffer, orders = quartet(rule="count(2) & deadline(10)")
    finish(buffer, orders[0], 1.0, 1.0)
    finish(buffer, orders[1], 20.0, 0.5)
    assert [member(buffer, order).baseline for order in orders] == [0.5, 1.0, 1.0, 1.0], (
        "but for its own slowness the second would have been sealed with the first at 10 s"
    )


def test_an_expiring_group_is_sealed_when_the_version_advances():
    buffer, orders = quartet(rule="all | expiring(1)", batch_size=4)
    finish(buffer, orders[0], 1.0)
    finish(buffer, orders[1], 1.0, 0.0)
    cases.fill(buffer, FIRST, limit=4)
    assert buffer.state.groups[orders[0].group_id].state is GroupState.OPEN
    record = buffer.take(FIRST, 1, 2.0)
    report = cases.StepReport(batch_id=record.batch_id, version=PolicyVersion(1, 1), skipped=False)
    buffer.commit(cases.lease_of(record), report, 3.0)
    group = buffer.state.groups[orders[0].group_id]
    assert (group.state, group.ended_at_s) == (GroupState.SEALED, 3.0), "bound 2, staleness 1: one update left"
    assert states(buffer, orders)[2:] == [RolloutState.IN_FLIGHT] * 2


def test_rules_tolerate_a_clock_that_jumps_back():
    buffer, orders = quartet(rule="count(3) & grace(5)")
    for now, order in zip((1000.0, 10.0, 500.0), orders[:3], strict=True):
        finish(buffer, order, now, now / 1000)
    assert buffer.due_at() == 1005.0
    buffer.tick(4.0)
    finish(buffer, orders[3], 3.0, 0.25)
    assert {member(buffer, order).state for order in orders} == {RolloutState.SEALED}
    assert all(math.isfinite(member(buffer, order).baseline) for order in orders)


def test_scales_for_early_groups_come_from_complete_groups():
    """Scales contain 4 / 3, so that the distance from the mean of the others becomes that from the mean of all."""
    buffer, orders = quartet(rule="count(3)", advantage="grpo")
    for order, reward in zip(orders, (4.0, 0.0, 0.0, 0.0), strict=True):
        finish(buffer, order, 1.0, reward)
    assert scale_of(buffer, orders) == pytest.approx(4 / 3, rel=1e-5), "no history yet"
    task = buffer.state.task(orders[0].task_id)
    assert (task.complete_members, task.grpo_square_sum, task.grpo_deviation_sum) == (4, 12.0, 6.0)
    other = buffer.issue(4, FIRST, 2.0)
    for order in other[:3]:
        finish(buffer, order, 3.0, 0.0)
    assert scale_of(buffer, other) == pytest.approx(2.0 * 4 / 3, rel=1e-5), "that of all tasks"
    finish(buffer, other[3], 3.0, 0.0)
    third = buffer.issue(4, FIRST, 4.0)
    for order in third[:3]:
        finish(buffer, order, 5.0, 0.0)
    assert scale_of(buffer, third) == pytest.approx(2.0 * 4 / 3, rel=1e-5), "flat groups do not lower it"


def test_a_complete_group_has_its_own_scale_and_a_flat_one_that_of_history():
    """A member of a flat group may be issued again and get another reward."""
    buffer, orders = quartet(advantage="grpo")
    for order, reward in zip(orders, (1.0, 0.0, 0.0, 1.0), strict=True):
        finish(buffer, order, 1.0, reward)
    deviation = math.sqrt(1 / 3)
    assert [member(buffer, order).advantage for order in orders] == pytest.approx(
        [sign * 0.5 / (deviation + 1e-6) for sign in (1, -1, -1, 1)]
    )
    second = buffer.issue(4, FIRST, 2.0)
    for order in second:
        finish(buffer, order, 3.0, 0.5)
    assert {member(buffer, order).advantage for order in second} == {0.0}
    assert scale_of(buffer, second) == pytest.approx(4 / 3 * deviation, rel=1e-5)


def test_a_group_sealed_with_a_running_member_is_not_filtered_for_zero_variance():
    buffer, orders = quartet(rule="count(3)", zero_variance="filter")
    for order in orders:
        finish(buffer, order, 1.0)
    assert states(buffer, orders) == [RolloutState.SEALED] * 4
    assert buffer.status().counters.get("groups_zero_variance", 0) == 0


def test_cancelled_attempts_over_the_bound_are_reissued_at_most_max_evictions_times():
    buffer, orders = quartet(batch_size=4, max_staleness=1, max_evictions=1)
    slow = orders[0]
    for order in orders[1:]:
        finish(buffer, order, 1.0)
    cases.fill(buffer, FIRST, limit=4)
    _, version = cases.step(buffer, FIRST)
    cases.fill(buffer, version, limit=4)
    _, version = cases.step(buffer, version)
    assert buffer.to_cancel(version) == ((slow.rollout_id, 1),)
    buffer.offer(cases.ended(slow, Cause.CANCELLED), 2.0)
    assert member(buffer, slow).evictions == 1
    (again,) = buffer.issue(1, PolicyVersion(1, 1), 3.0)
    assert again.rollout_id == slow.rollout_id
    cases.fill(buffer, version, limit=4)
    cases.step(buffer, version)
    buffer.offer(cases.ended(again, Cause.CANCELLED), 4.0)
    assert member(buffer, slow).state is RolloutState.EVICTED
    assert buffer.state.groups[slow.group_id].state is GroupState.SEALED, "the others are not held up"
    assert buffer.state.groups[slow.group_id].complete_before is None


def test_a_cancellation_within_the_bound_is_not_an_eviction():
    buffer, orders = quartet()
    buffer.offer(cases.ended(orders[0], Cause.CANCELLED), 1.0)
    assert (member(buffer, orders[0]).state, member(buffer, orders[0]).evictions) == (RolloutState.PENDING, 0)
