"""What failures are charged to: tasks, hosts, engines, workers, outages; and when orders are held."""

from __future__ import annotations

import pytest

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.outages import PROBE_S, WINDOW_S
from headrace.buffer.core.records import Charge, RolloutState
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.errors import TaskNotParked
from headrace.buffer.ledger.ledger import Ledger
from headrace.buffer.trajectories.types import Cause
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)


def buffer_of(tasks=40, **changes):
    config = BufferConfig(**({"batch_size": 64, "group_size": 2, "max_attempts": 2, "park_after": 1} | changes))
    buffer = ReplayBuffer(config, TaskStream(cases.tasks(tasks), seed=3))
    buffer.open_epoch(None, 0.0)
    return buffer


def fail(buffer, order, now, **more):
    buffer.offer(cases.ended(order, Cause.INFRA, **more), now)
    return buffer.state.attempts[order.rollout_id].charged_to


def fail_again_and_again(buffer, hosts, *, apart_s):
    """All attempts of the one task, on these hosts in turn; what they were charged to."""
    charged = []
    for number, host in enumerate(hosts):
        (order,) = buffer.issue(1, FIRST, number * apart_s)
        charged.append(fail(buffer, order, number * apart_s + 1.0, host=host))
    return charged


def test_a_task_is_charged_once_it_has_failed_on_different_hosts_at_different_times():
    buffer = buffer_of(tasks=1)
    assert fail_again_and_again(buffer, ["a", "b"], apart_s=100.0) == [Charge.HOST, Charge.TASK]
    assert list(buffer.status().parked) == ["task-0"]


@pytest.mark.parametrize(
    ("hosts", "apart_s"),
    [(["a"] * 6, 100.0), (["a", "b", "c", "a", "b", "c"], 1.0), ([""] * 6, 100.0), (["", "a", "", "a"], 100.0)],
    ids=["one host", "one time", "unknown hosts", "one known host"],
)
def test_failures_that_a_host_may_have_caused_park_no_task(hosts, apart_s):
    buffer = buffer_of(tasks=1)
    assert set(fail_again_and_again(buffer, hosts, apart_s=apart_s)) == {Charge.HOST}
    assert buffer.status().parked == {}
    assert buffer.state.task("task-0").poison == len(hosts) // 2, "a rollout that fails again and again still ends"


def test_a_result_clears_the_record_of_a_task():
    buffer = buffer_of(tasks=1)
    first, second = buffer.issue(2, FIRST, 0.0)
    fail(buffer, first, 1.0, host="a")
    buffer.offer(cases.result(second, FIRST), 2.0)
    (again,) = buffer.issue(1, FIRST, 100.0)
    assert fail(buffer, again, 200.0, host="b") is Charge.HOST


@pytest.mark.parametrize("minutes", [2, 10, 30])
def test_no_task_is_charged_while_no_engine_is_serving(minutes):
    buffer = buffer_of()
    running = buffer.issue(1000, FIRST, 0.0)
    buffer.engines(serving=False, now=10.0)
    for second in range(0, 60 * minutes, 20):
        for order in running:
            fail(buffer, order, 10.0 + second, host=f"host-{second % 3}", engine_failed=True)
        assert buffer.issue(1000, FIRST, 10.0 + second) == ()
        assert buffer.status().held == "no engine serves, since 1970-01-01 00:00:10 UTC"
        running = ()
    buffer.engines(serving=True, now=10.0 + 60 * minutes)
    assert buffer.status().held == ""
    assert len(buffer.issue(1000, FIRST, 11.0 + 60 * minutes)) > 0
    assert buffer.status().parked == {}
    assert {attempt.charged_to for attempt in buffer.state.attempts.values()} <= {Charge.OUTAGE, None}
    assert all(rollout.failures == 0 for rollout in buffer.state.rollouts.values())


def test_an_attempt_running_throughout_an_outage_is_charged_to_it():
    buffer = buffer_of()
    orders = buffer.issue(2, FIRST, 0.0)
    buffer.engines(serving=False, now=10.0)
    buffer.engines(serving=True, now=20.0)
    assert fail(buffer, orders[0], 500.0, host="a") is Charge.OUTAGE
    (later,) = buffer.issue(1, FIRST, 501.0)
    assert fail(buffer, later, 502.0, host="a") is Charge.HOST
    assert fail(buffer, buffer.issue(1, FIRST, 503.0)[0], 504.0, engine_failed=True) is Charge.ENGINES


def test_a_dead_worker_is_charged_only_to_the_worker():
    buffer = buffer_of()
    for number in range(5):
        (order,) = buffer.issue(1, FIRST, 100.0 * number)
        buffer.abandon([(order.rollout_id, order.attempt)], 100.0 * number + 1)
        rollout = buffer.state.rollouts[order.rollout_id]
        assert (rollout.state, rollout.failures) == (RolloutState.PENDING, 0)
    assert buffer.status().held == ""


def break_down(buffer, *, tasks, now=100.0):
    """The first attempt of two members of so many tasks fails."""
    for order in buffer.issue(2 * tasks, FIRST, now):
        fail(buffer, order, now, host="a")


def test_orders_are_held_while_most_attempts_of_several_tasks_fail():
    buffer = buffer_of()
    break_down(buffer, tasks=4)
    assert buffer.status().held == "", "four tasks say nothing about the system"
    break_down(buffer, tasks=6, now=101.0)
    reason = "17 of the last 17 attempts failed, over 5 tasks, since 1970-01-01 00:01:41 UTC"
    assert buffer.status().held == reason
    assert buffer.issue(1000, FIRST, 102.0) == ()
    assert buffer.outages.wakes_at(102.0) == 101.0 + PROBE_S


def test_orders_continue_while_enough_attempts_succeed():
    buffer = buffer_of()
    for order in buffer.issue(20, FIRST, 0.0):
        buffer.offer(cases.result(order, FIRST), 1.0)
    break_down(buffer, tasks=10)
    assert buffer.status().held == "", "half of them is not more than half"
    assert len(buffer.issue(1, FIRST, 101.0)) == 1


def failing():
    buffer = buffer_of()
    break_down(buffer, tasks=8)
    assert buffer.status().held
    return buffer


def failing_with_no_room(**changes):
    """As `failing`, with a stock that only rollouts of failing tasks fill."""
    buffer = buffer_of(batch_size=4, **changes)
    break_down(buffer, tasks=8)
    assert buffer.status().held
    return buffer


def test_a_successful_probe_ends_the_hold():
    buffer = failing()
    assert buffer.issue(9, FIRST, 100.0 + PROBE_S - 1) == ()
    (probe,) = buffer.issue(9, FIRST, 100.0 + PROBE_S)
    assert fail(buffer, probe, 165.0, host="b") is Charge.OUTAGE
    assert buffer.issue(9, FIRST, 166.0) == ()
    (probe,) = buffer.issue(9, FIRST, 100.0 + 2 * PROBE_S)
    buffer.offer(cases.result(probe, FIRST), 225.0)
    assert buffer.status().held == ""
    assert len(buffer.issue(9, FIRST, 226.0)) == 9
    assert buffer.status().parked == {}


def test_a_hold_ends_when_its_window_has_passed():
    buffer = failing()
    assert len(buffer.issue(9, FIRST, 100.0 + WINDOW_S + 1)) == 9
    assert buffer.status().held == ""


def test_an_attempt_started_when_an_outage_ends_is_not_charged_to_it():
    buffer = failing()
    orders = buffer.issue(9, FIRST, 100.0 + WINDOW_S + 1)
    assert fail(buffer, orders[0], 800.0, host="b") is Charge.HOST


def test_the_probe_uses_a_task_that_did_not_fail():
    buffer = failing()
    failed = {f"g{ordinal:06d}" for ordinal in range(8)}
    (probe,) = buffer.issue(9, FIRST, 100.0 + PROBE_S)
    assert probe.group_id not in failed, "whose rollouts are pending, and may fail for reasons of their own"
    fail(buffer, probe, 165.0, host="a")
    (another,) = buffer.issue(9, FIRST, 100.0 + 2 * PROBE_S)
    assert another.group_id not in failed | {probe.group_id}


def test_the_probe_uses_any_task_if_all_have_failed():
    buffer = failing_with_no_room()
    assert len(buffer.issue(9, FIRST, 100.0 + PROBE_S)) == 1


def test_broken_tasks_do_not_hold_back_all_orders_forever():
    buffer, now = failing_with_no_room(max_attempts=5), 100.0
    while not buffer.state.by_state[RolloutState.POISON]:
        now += PROBE_S
        for order in buffer.issue(1000, FIRST, now):
            fail(buffer, order, now + 1, host="a")
        assert now < 6 * WINDOW_S, "no broken rollout ends"


def test_a_clock_set_back_does_not_extend_a_hold():
    buffer = failing()
    assert len(buffer.issue(9, FIRST, -7200.0)) > 0


def test_tasks_parked_because_of_a_failing_system_are_released():
    buffer = buffer_of(batch_size=4, max_attempts=1)
    for number, order in enumerate(buffer.issue(8, FIRST, 0.0)):
        fail(buffer, order, 100.0 * (number % 2) + number, host=f"host-{number % 2}")
    assert len(buffer.status().parked) == 4
    for order in buffer.issue(2, FIRST, 200.0):
        fail(buffer, order, 200.0)
    assert buffer.status().held
    assert buffer.status().parked == {}


def test_a_hold_and_the_task_records_survive_a_restart(tmp_path):
    buffer = failing()
    with_engines = buffer_of(tasks=1)
    with_engines.engines(serving=False, now=5.0)
    for number, before in enumerate((buffer, with_engines)):
        ledger = Ledger.open(tmp_path / str(number), {"run_id": "run"})
        ledger.write(before.drain(), [])
        again = ReplayBuffer(before.config, TaskStream(cases.tasks(40), seed=3), ledger.load())
        ledger.close()
        assert again.state.outages == before.state.outages
        assert again.state.tasks == before.state.tasks
        assert again.status().held == before.status().held


def test_a_released_task_is_issued_again():
    buffer = buffer_of(tasks=1)
    fail_again_and_again(buffer, ["a", "b"], apart_s=100.0)
    with pytest.raises(TaskNotParked, match=r"task-7 is not parked: .*\(task-0\)"):
        buffer.operators.unpark(["task-0", "task-7"], 900.0)
    assert list(buffer.status().parked) == ["task-0"]
    assert buffer.operators.unpark(None, 900.0) == ("task-0",)
    [entry] = buffer.state.interventions.values()
    assert (entry.action, entry.subject, entry.detail) == ("unpark", "task-0", "it broke")
    assert buffer.status().parked == {}
    while (orders := buffer.issue(4, FIRST, 1000.0)) and orders[0].group_id == "g000000":
        for order in orders:
            buffer.offer(cases.result(order, FIRST), 1001.0)
    assert buffer.state.groups["g000001"].task_id == "task-0"
