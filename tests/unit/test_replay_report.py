"""The report on long rollouts: every finished attempt in one decile, with one fate."""

from __future__ import annotations

import pytest

from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.report import acceptance
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.ledger.ledger import Ledger
from headrace.buffer.trajectories.types import Cause
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
IDENTITY = {"run_id": "run"}


def evidence_of(buffer, run_dir):
    ledger = Ledger.open(run_dir, IDENTITY)
    ledger.write(buffer.drain(), [])
    ledger.close()
    return read_evidence(run_dir)


def buffer_of(**changes):
    buffer = cases.core(BufferConfig(**({"batch_size": 20, "group_size": 4, "max_staleness": 1} | changes)))
    buffer.open_epoch(None, 0.0)
    return buffer


def test_deciles_add_up_and_show_the_outcome_of_long_rollouts(tmp_path):
    buffer = buffer_of(max_evictions=1)
    orders = buffer.issue(40, FIRST, 0.0)
    for seconds, order in enumerate(orders, start=1):
        buffer.offer(cases.result(order, FIRST, reward=seconds / 40, trainable=seconds != 40), float(seconds))
    cases.step(buffer, FIRST)
    rows = acceptance(evidence_of(buffer, tmp_path)).deciles
    assert [row.decile for row in rows] == list(range(1, 11))
    assert [row.finished for row in rows] == [4] * 10
    assert all(row.finished == row.trained + row.evicted + row.undone + row.filtered + row.held for row in rows)
    assert [row.trained for row in rows] == [4] * 5 + [0] * 5, "sealed first, trained first"
    assert (rows[0].shortest_s, rows[0].longest_s, rows[9].longest_s) == (1.0, 4.0, 40.0)
    assert (rows[9].filtered, rows[9].held) == (1, 3)
    assert rows[1].mean_reward == pytest.approx(6.5 / 40)


def test_reissued_rollouts_count_as_evicted_and_aborted_ones_as_cancelled(tmp_path):
    buffer = buffer_of(batch_size=4, rule="count(3)", unfinished="abort")
    first = buffer.issue(4, FIRST, 0.0)
    for seconds, order in enumerate(first[:3], start=1):
        buffer.offer(cases.result(order, FIRST), float(seconds))
    second = buffer.issue(4, FIRST, 10.0)
    buffer.offer(cases.ended(second[0], Cause.CANCELLED), 12.0)
    assert buffer.keep_in_flight((), 13.0) == 3
    rows = acceptance(evidence_of(buffer, tmp_path)).deciles
    assert [(row.longest_s, row.cancelled) for row in rows] == [(1.0, 0), (2.0, 1), (3.0, 1)], (
        "one was told to end after two seconds, one was left out after three; those of the lost driver do not count"
    )


def test_a_reissued_rollout_counts_as_evicted(tmp_path):
    buffer = buffer_of(batch_size=4)
    version = FIRST
    for seconds in (5.0, 60.0, 600.0):
        for order in buffer.issue(4, version, 0.0):
            buffer.offer(cases.result(order, FIRST), seconds)
        if seconds < 600:
            _, version = cases.step(buffer, version)
    assert buffer.take(version, 1, 700.0) is None
    rows = acceptance(evidence_of(buffer, tmp_path)).deciles
    assert sum(row.trained for row in rows) == 8
    assert {row.longest_s for row in rows if row.evicted} == {600.0}
    assert sum(row.evicted for row in rows) == 4


def test_a_lost_and_reissued_rollout_does_not_count_as_evicted(tmp_path):
    buffer = buffer_of(batch_size=8)
    orders = buffer.issue(4, FIRST, 0.0)
    for order in orders:
        buffer.offer(cases.result(order, FIRST), 5.0)
    again = buffer.operators.retry_lost({orders[0].rollout_id: "its trajectory is missing"}, 6.0)
    assert again == (orders[0].rollout_id,)
    report = acceptance(evidence_of(buffer, tmp_path))
    assert (report.evicted, sum(row.evicted for row in report.deciles)) == (0, 0)
    assert (sum(row.undone for row in report.deciles), sum(row.held for row in report.deciles)) == (1, 3)


def test_left_out_members_are_reported_for_each_group(tmp_path):
    buffer = buffer_of(rule="count(3)")
    orders = buffer.issue(8, FIRST, 0.0)
    for seconds, order in zip((1.0, 2.0, 3.0, 100.0), orders[:4], strict=True):
        buffer.offer(cases.result(order, FIRST, reward=float(seconds > 50)), seconds)
    for order in orders[4:7]:
        buffer.offer(cases.result(order, FIRST), 200.0)
    one, other = acceptance(evidence_of(buffer, tmp_path)).left_out
    assert (one.rule, one.early, one.late, one.late_finished) == ("count(3)", 3, 1, 1)
    assert (one.early_mean_s, one.late_mean_s, one.early_mean_reward, one.late_mean_reward) == (2.0, 100.0, 0.0, 1.0)
    assert (other.late, other.late_finished, other.late_mean_s) == (1, 0, None)


def test_deciles_are_empty_when_nothing_has_finished(tmp_path):
    buffer = buffer_of()
    buffer.issue(4, FIRST, 0.0)
    assert acceptance(evidence_of(buffer, tmp_path)).deciles == ()
