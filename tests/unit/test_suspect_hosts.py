"""Hosts that fail significantly more often than others: the exact test, and what orders avoid."""

from __future__ import annotations

import pytest

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.outages import PROBE_S, HostRecords, exact_test
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.trajectories.types import Cause
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)


@pytest.mark.parametrize(
    ("table", "chance"),
    [((8, 10, 1, 10), 0.0027), ((3, 3, 0, 6), 1 / 84), ((0, 5, 2, 5), 1.0), ((20, 20, 20, 20), 1.0)],
)
def test_the_exact_test_agrees_with_known_tables(table: tuple[int, int, int, int], chance: float) -> None:
    assert exact_test(*table) == pytest.approx(chance, abs=1e-4)


def records(**ends: str) -> HostRecords:
    """By host: a letter for each attempt, `x` for one that failed."""
    found = HostRecords()
    for host, letters in ends.items():
        for letter in letters:
            found.add(host, failed=letter == "x")
    return found


def test_a_host_is_suspect_only_if_others_do_better() -> None:
    assert dict(records(a="xxxxxx", b="........", c=".......").suspects()) == {"a": "6 of its last 6 attempts failed"}
    assert records(a="xxxxxx").suspects() == {}, "nothing to compare with"
    assert records(a="xx", b=".....").suspects() == {}, "chance"
    assert records(a="xxxxxx", b="xxxxx.", c="xxxx.x").suspects() == {}, "all of them fail"
    assert records(a="x" * 20 + "." * 20, b="." * 20).suspects() == {}, "what is long ago is forgotten"


def test_a_suspect_host_gets_one_probe_a_minute() -> None:
    found = records(a="xxxxxx", b="........")
    assert [found.avoided(now) for now in (0.0, 1.0, PROBE_S - 1)] == [("a",)] * 3
    assert found.avoided(PROBE_S) == ()
    assert found.avoided(PROBE_S + 1) == ("a",)
    assert found.avoided(-7200.0) == (), "a clock that is set back"


def test_orders_avoid_suspect_hosts_and_hosts_where_they_failed() -> None:
    config = BufferConfig(batch_size=64, group_size=2, max_attempts=3)
    buffer = ReplayBuffer(config, TaskStream(cases.tasks(40), seed=3))
    buffer.open_epoch(None, 0.0)
    (first,) = buffer.issue(1, FIRST, 0.0)
    assert first.avoid == ()
    buffer.offer(cases.ended(first, Cause.INFRA, host="bad"), 1.0)
    (again,) = buffer.issue(1, FIRST, 2.0)
    assert (again.rollout_id, again.avoid) == (first.rollout_id, ("bad",))
    for place, order in enumerate(buffer.issue(30, FIRST, 3.0)):
        bad = place % 3 == 0
        ended = cases.ended(order, Cause.INFRA, host="bad") if bad else cases.result(order, FIRST, host="good")
        buffer.offer(ended, 4.0 + place)
    assert list(buffer.status().suspects) == ["bad"]
    assert {order.avoid for order in buffer.issue(9, FIRST, 40.0)} == {("bad",)}
    assert buffer.status().held == "", "the host explains its failures"
