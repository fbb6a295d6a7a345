"""Tasks: their history, parking, curricula, and the end of the data."""

from __future__ import annotations

import pickle
import random
import zlib
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import WINDOW, TaskCursor, TaskStream, success
from headrace.buffer.core.records import RolloutState, Snapshot, TaskRecord
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.core.state import ReplayState
from headrace.buffer.errors import DataExhausted
from headrace.buffer.ledger.ledger import Ledger
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.types import Cause
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)


def buffer_of(tasks=8, snapshot=None, **changes):
    config = BufferConfig(**({"batch_size": 4, "group_size": 2, "max_staleness": 2, "max_attempts": 1} | changes))
    buffer = ReplayBuffer(config, TaskStream(cases.tasks(tasks), seed=3), snapshot)
    if snapshot is None:
        buffer.open_epoch(None, 0.0)
    return buffer


def opened(buffer):
    groups = sorted(buffer.state.groups.values(), key=lambda group: group.ordinal)
    return [group.task_id for group in groups]


def train_on(buffer, version, steps=1000, outcome=lambda order: 1.0):
    """Issue, finish and train until the data is used up or `steps` are done; None as an outcome is infra."""
    for _ in range(steps):
        for order in buffer.issue(1000, version, 0.0):
            reward = outcome(order)
            buffer.offer(
                cases.ended(order, Cause.INFRA) if reward is None else cases.result(order, version, reward=reward), 1.0
            )
        if buffer.take(version, version.epoch, 1.0) is not None:
            _, version = cases.step(buffer, version, version.epoch)
    return version


def test_a_task_counts_solved_rollouts_not_rewarded_ones():
    buffer = buffer_of()
    first, second = buffer.issue(2, FIRST, 10.0)
    buffer.offer(cases.result(first, FIRST, reward=0.1, solved=False), 15.0)
    assert buffer.state.task(first.task_id).solved == 0
    buffer.offer(cases.result(second, FIRST, reward=-1.0, solved=True), 15.0)
    assert (second.task_id, buffer.state.task(first.task_id).solved) == (first.task_id, 1)


def test_results_and_failures_are_recorded_in_the_history_of_a_task():
    buffer = buffer_of()
    first, second, third, fourth = buffer.issue(4, FIRST, 10.0)
    buffer.offer(cases.result(first, FIRST, reward=1.0), 15.0)
    buffer.offer(cases.result(second, FIRST, reward=0.0), 17.0)
    buffer.offer(cases.ended(third, Cause.INFRA), 18.0)
    task = buffer.state.task(first.task_id)
    assert (task.groups, task.finished, task.solved, task.duration_s, task.last_pass) == (1, 2, 1, 12.0, 0)
    assert (task.complete_members, task.reward_sum, task.reward_square_sum) == (2, 1.0, 1.0)
    assert task.grpo_square_sum == 0.5
    other = buffer.state.task(fourth.task_id)
    assert (other.infra, other.poison, other.poison_streak, other.last_failure) == (1, 1, 1, "it broke")


def test_a_repeatedly_poisoned_task_is_parked_with_a_reason():
    buffer = buffer_of()
    bad = buffer.issue(1, FIRST, 0.0)[0].task_id
    (second,) = buffer.issue(1, FIRST, 0.0)
    for number, rollout in enumerate(buffer.state.rollouts_of(second.group_id)):
        order = SimpleNamespace(rollout_id=rollout.rollout_id, attempt=1)
        buffer.offer(cases.ended(order, Cause.INFRA, host=f"host-{number}"), 100.0 * number)
    assert buffer.status().parked == {bad: "it broke"}
    assert buffer.status().counters["tasks_parked"] == 1
    with pytest.raises(DataExhausted):
        train_on(buffer_of(tasks=4, passes=1), FIRST, outcome=lambda order: None)
    train_on(buffer, FIRST, steps=12)
    assert opened(buffer).count(bad) == 1
    assert min(opened(buffer).count(task.id) for task in cases.tasks() if task.id != bad) >= 2
    again = buffer_of(snapshot=Snapshot(records=buffer.drain()))
    assert again.status().parked == {bad: "it broke"}


def test_a_finished_member_ends_the_failure_streak():
    buffer = buffer_of(tasks=1, group_size=3, batch_size=6)
    for ends in ((None, 1.0, None), (1.0, None, 1.0)):
        for order, reward in zip(buffer.issue(3, FIRST, 0.0), ends, strict=True):
            buffer.offer(
                cases.ended(order, Cause.INFRA) if reward is None else cases.result(order, FIRST, reward=reward), 1.0
            )
    assert buffer.state.task(order.task_id).poison == 3
    assert buffer.status().parked == {}


def test_frontier_tasks_are_preferred_and_no_task_starves():
    state = ReplayState(Snapshot())
    stream = TaskStream(cases.tasks(20), seed=0)
    order = stream.order(0)
    rates = {task: rank % 5 / 4 for rank, task in enumerate(order)}
    for task, rate in rates.items():
        state.put(TaskRecord(task_id=task, finished=100, solved=int(100 * rate)))
    cursor = TaskCursor(state, stream, curriculum="frontier", passes=1)
    taken = []
    while (following := cursor.next()) is not None:
        taken.append(following[0])
        state.put(TaskRecord(task_id=following[0], finished=100, solved=50, last_pass=0))
        again = TaskCursor(state, stream, curriculum="frontier", passes=1)
        assert again.left() == cursor.left(), "a resumed run is where this one is"
    assert sorted(taken) == sorted(order), "each once in the pass"
    assert taken[0] == order[2], "half of the time, and first in the window"
    assert [abs(rates[task] - 0.5) for task in taken[:2]] == [0.0, 0.0]
    assert all(position - order.index(task) <= len(order) for position, task in enumerate(taken))
    assert order.index(taken[0]) < WINDOW


def test_the_assumed_success_rate_of_an_unknown_task_is_one_half():
    assert success(TaskRecord(task_id=TaskId("x"))) == 0.5
    assert success(TaskRecord(task_id=TaskId("x"), finished=8, solved=8)) == 0.9


@pytest.mark.parametrize("curriculum", ["none", "frontier"])
def test_a_resumed_run_opens_the_same_groups(tmp_path, curriculum):
    changes = {"tasks": 12, "curriculum": curriculum, "max_attempts": 3}

    def outcome(order):
        return float(zlib.crc32(f"{order.task_id} {order.rollout_id}".encode()) % 3 > 0)

    straight = buffer_of(**changes)
    train_on(straight, FIRST, steps=8, outcome=outcome)
    halved = buffer_of(**changes)
    version = train_on(halved, FIRST, steps=4, outcome=outcome)
    ledger = Ledger.open(tmp_path, {"run_id": "run"})
    ledger.write(halved.drain(), [])
    resumed = buffer_of(**changes, snapshot=ledger.load())
    ledger.close()
    train_on(resumed, version, steps=4, outcome=outcome)
    assert opened(resumed) == opened(straight)


def test_the_end_of_the_data_reports_the_remaining_rollouts():
    buffer = buffer_of(tasks=5, passes=1)
    with pytest.raises(DataExhausted, match=r"2 rollouts are left over.*buffer\.passes") as caught:
        train_on(buffer, FIRST)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert len(opened(buffer)) == 5
    assert buffer.status().rollouts[RolloutState.TRAINED] == 8
    assert buffer.issue(1000, buffer.state.path.head, 5.0) == ()
    assert buffer.admit() == 0


def test_the_data_is_not_exhausted_while_a_batch_may_still_be_filled():
    buffer = buffer_of(tasks=2, passes=1, max_attempts=2)
    orders = buffer.issue(4, FIRST, 0.0)
    for order in orders[:3]:
        buffer.offer(cases.result(order, FIRST), 1.0)
    assert buffer.take(FIRST, 1, 2.0) is None, "one is in flight"
    buffer.offer(cases.ended(orders[3], Cause.INFRA), 3.0)
    assert buffer.take(FIRST, 1, 3.0) is None, "it is issued again"
    (again,) = buffer.issue(1, FIRST, 4.0)
    buffer.offer(cases.result(again, FIRST), 5.0)
    record = buffer.take(FIRST, 1, 6.0)
    with pytest.raises(DataExhausted, match="0 rollouts"):
        buffer.take(PolicyVersion(1, 1), 1, 6.0)
    buffer.batches.release(cases.lease_of(record))
    assert buffer.take(FIRST, 1, 7.0).members == record.members, "what was given back is there again"


@given(
    seed=st.integers(0, 1 << 16),
    tasks=st.integers(1, 7),
    passes=st.integers(1, 3),
    sizes=st.sampled_from([(4, 2), (3, 2), (5, 3), (7, 4), (1, 2)]),
    rule=st.sampled_from(["all", "count(2)", "deadline(3)", "grace(2) | expiring(1)"]),
    unfinished=st.sampled_from(["carry", "abort"]),
    mode=st.sampled_from([("async", 2), ("async", 4), ("sync", 0), ("sync", 2), ("one-step-off", 2)]),
)
@settings(max_examples=60, deadline=None)
def test_the_end_of_the_data_is_always_reached(seed, tasks, passes, sizes, rule, unfinished, mode):
    """Whatever ends how: no state in which nothing can happen any more and nobody is told."""
    if mode[1] == 0 and "expiring" in rule:
        rule = "all"
    batch_size, group_size = sizes
    config = {"rule": rule, "unfinished": unfinished, "mode": mode[0], "max_staleness": mode[1], "passes": passes}
    buffer = buffer_of(tasks=tasks, batch_size=batch_size, group_size=group_size, max_attempts=2, **config)
    chance, version, running, now = random.Random(seed), FIRST, [], 0.0
    with pytest.raises(DataExhausted):
        for _ in range(60 * tasks * passes * group_size):
            now += 1.0
            running += buffer.issue(chance.randint(1, 9), version, now)
            cancel = set(buffer.to_cancel(version))
            for order in [order for order in running if chance.random() < 0.5]:
                running.remove(order)
                if (order.rollout_id, order.attempt) in cancel:
                    buffer.offer(cases.ended(order, Cause.CANCELLED), now)
                elif chance.random() < 0.15:
                    buffer.offer(cases.ended(order, Cause.INFRA), now)
                else:
                    tokens = (version,) if chance.random() < 0.9 else ()
                    buffer.offer(cases.result(order, *tokens, reward=chance.random()), now)
            if buffer.take(version, 1, now) is not None:
                _, version = cases.step(buffer, version)
    status = buffer.status()
    assert status.inventory.total < batch_size
    assert status.groups_opened == tasks * passes or status.parked
