"""Batches: the bound, leases, commits, epochs, rollbacks."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from headrace.buffer.core.epochs import EPOCHS_RESERVED
from headrace.buffer.core.records import RolloutState
from headrace.buffer.errors import (
    BatchUntrainable,
    CheckpointLate,
    LeaseError,
    LedgerBehind,
    LedgerMismatch,
    StaleEpoch,
    VersionMismatch,
)
from headrace.buffer.trajectories.types import BatchId, BatchLease, Cause, StepReport, batch_digest, extend_chain
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)


@pytest.fixture
def stocked():
    """Batches of 4 in groups of 2, bound 2: twelve sealed rollouts of version 1.0."""
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    cases.fill(buffer, FIRST)
    return buffer


def ids(record):
    return [member.rollout_id for member in record.members]


def test_a_take_returns_exactly_batch_size_rollouts_oldest_first(stocked):
    record = stocked.take(FIRST, 1, 2.0)
    assert ids(record) == ["g000000-0", "g000000-1", "g000001-0", "g000001-1"]
    assert stocked.inventory().leased == 4
    assert stocked.take(FIRST, 1, 2.0) == record, "a repeated take is the same lease"


def test_nothing_is_taken_before_a_batch_is_full():
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    orders = buffer.issue(4, FIRST, 0.0)
    for order in orders[:3]:
        buffer.offer(cases.result(order, FIRST), 1.0)
    assert buffer.take(FIRST, 1, 2.0) is None
    buffer.offer(cases.result(orders[3], FIRST), 1.0)
    assert buffer.take(FIRST, 1, 2.0) is not None


def test_a_take_at_another_version_is_refused(stocked):
    with pytest.raises(VersionMismatch, match=r"at version 1\.1"):
        stocked.take(PolicyVersion(1, 1), 1, 2.0)
    first = stocked.take(FIRST, 1, 2.0)
    ahead = stocked.take(PolicyVersion(1, 1), 1, 2.0)
    assert ahead.members[0].staleness == 1
    report = cases.StepReport(batch_id=first.batch_id, version=PolicyVersion(1, 2), skipped=False)
    with pytest.raises(VersionMismatch, match=r"expected 1\.1"):
        stocked.commit(cases.lease_of(first), report, 3.0)
    with pytest.raises(LeaseError, match="order taken"):
        stocked.commit(
            cases.lease_of(ahead), replace(report, batch_id=ahead.batch_id, version=PolicyVersion(1, 1)), 3.0
        )


def test_a_rollout_over_the_bound_is_reissued_first_and_evicted_later(stocked):
    version = FIRST
    for _ in range(3):
        record, version = cases.step(stocked, version)
    assert [member.staleness for member in record.members] == [2, 2, 2, 2]
    slow = cases.fill(stocked, version, limit=2, sampled=FIRST)
    fixed = [stocked.state.rollouts[order.rollout_id] for order in slow]
    cases.fill(stocked, version, limit=4)
    for evictions in (1, 2):
        record = stocked.take(version, 1, 4.0)
        assert not {order.rollout_id for order in slow} & set(ids(record))
        stocked.batches.release(cases.lease_of(record))
        assert stocked.inventory().pending == 2
        again = stocked.issue(2, version, 5.0)
        assert [(order.rollout_id, order.attempt) for order in again] == [
            (order.rollout_id, evictions + 1) for order in slow
        ]
        for order in again:
            stocked.offer(cases.result(order, FIRST, reward=0.25), 6.0)
    now = [stocked.state.rollouts[order.rollout_id] for order in slow]
    assert [(one.baseline, one.scale, one.first_reward) for one in now] == [
        (one.baseline, one.scale, one.first_reward) for one in fixed
    ]
    assert [one.advantage for one in now] == [(0.25 - one.baseline) / one.scale for one in now]
    stocked.take(version, 1, 7.0)
    assert stocked.status().rollouts[RolloutState.EVICTED] == 2, "two chances, and no more"
    assert stocked.status().counters["rollouts_evicted"] == 2
    assert stocked.status().counters["rollouts_reissued"] == 4
    assert stocked.inventory().pending == 0


def test_the_stalest_rollouts_are_taken_first_then_the_oldest():
    buffer = cases.core(cases.SMALL.model_copy(update={"max_staleness": 3}))
    buffer.open_epoch(None, 0.0)
    cases.fill(buffer, FIRST, limit=4)
    slow = buffer.issue(2, FIRST, 0.0)
    _, version = cases.step(buffer, FIRST)
    fast = cases.fill(buffer, version, limit=4)
    for order in slow:
        buffer.offer(cases.result(order, FIRST), 2.0)
    record = buffer.take(version, 1, 3.0)
    assert ids(record) == [order.rollout_id for order in (*slow, *fast[:2])], "sealed last, but most urgent"


def test_staleness_is_measured_from_the_oldest_trained_token():
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    version = FIRST
    cases.fill(buffer, FIRST, limit=8)
    for _ in range(2):
        _, version = cases.step(buffer, version)
    for order in buffer.issue(4, version, 0.0):
        buffer.offer(cases.result(order, version, FIRST), 1.0)
    assert {member.staleness for member in buffer.take(version, 1, 2.0).members} == {2}


def test_a_commit_is_idempotent_and_extends_the_chain(stocked):
    record, version = cases.step(stocked, FIRST)
    digest = batch_digest(record.batch_id, tuple((member.rollout_id, member.attempt) for member in record.members))
    assert stocked.state.path.chain == extend_chain("", digest)
    stocked.drain()
    stocked.commit(
        cases.lease_of(record), cases.StepReport(batch_id=record.batch_id, version=version, skipped=False), 9.0
    )
    assert stocked.drain() == ()
    with pytest.raises(LeaseError):
        stocked.batches.release(cases.lease_of(record))
    with pytest.raises(LeaseError, match="not leased"):
        stocked.commit(
            BatchLease(batch_id=BatchId("b99"), epoch=1),
            cases.StepReport(batch_id=BatchId("b99"), version=version, skipped=False),
            9.0,
        )


def test_a_skipped_step_consumes_its_batch_and_keeps_the_version(stocked):
    first = stocked.take(FIRST, 1, 2.0)
    ahead = stocked.take(PolicyVersion(1, 1), 1, 2.0)
    stocked.commit(cases.lease_of(first), cases.StepReport(batch_id=first.batch_id, version=FIRST, skipped=True), 3.0)
    assert stocked.state.path.head == FIRST
    assert stocked.status().steps_skipped == 1
    restamped = stocked.state.path.batches[ahead.batch_id]
    assert restamped.version == FIRST
    assert [member.staleness for member in restamped.members] == [0, 0, 0, 0]
    assert stocked.take(FIRST, 1, 3.0) == restamped


def test_a_released_batch_is_issued_again_unchanged(stocked):
    record = stocked.take(FIRST, 1, 2.0)
    stocked.batches.release(cases.lease_of(record))
    stocked.batches.release(cases.lease_of(record))
    assert stocked.inventory().leased == 0
    again = stocked.take(FIRST, 1, 3.0)
    assert (again.batch_id, ids(again)) == (record.batch_id, ids(record))


def test_older_epochs_are_fenced(stocked):
    record = stocked.take(FIRST, 1, 2.0)
    assert stocked.open_epoch(None, 3.0) == PolicyVersion(2, 0)
    report = cases.StepReport(batch_id=record.batch_id, version=PolicyVersion(1, 1), skipped=False)
    stocked.drain()
    for call in (
        lambda: stocked.commit(cases.lease_of(record), report, 4.0),
        lambda: stocked.take(FIRST, 1, 4.0),
        lambda: stocked.batches.release(cases.lease_of(record)),
        lambda: stocked.epochs.checkpointed(cases.checkpoint(stocked, FIRST), 4.0),
    ):
        with pytest.raises(StaleEpoch) as caught:
            call()
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert stocked.drain() == ()
    again = stocked.take(PolicyVersion(2, 0), 2, 4.0)
    assert (again.batch_id, ids(again)) == (record.batch_id, ids(record))


def test_resuming_issues_the_undone_batches_again_in_order(stocked):
    first, version = cases.step(stocked, FIRST)
    saved = cases.checkpoint(stocked, version)
    stocked.epochs.checkpointed(saved, 3.0)
    cases.fill(stocked, version)
    second, version = cases.step(stocked, version)
    third, version = cases.step(stocked, version)
    held = stocked.take(version, 1, 4.0)
    start = stocked.open_epoch(saved, 5.0)
    assert start == PolicyVersion(2, 1)
    assert stocked.status().steps_committed == 1
    assert stocked.state.path.chain == saved.chain
    assert stocked.status().counters["batches_rolled_back"] == 2
    version, again = start, []
    for _ in range(3):
        record, version = cases.step(stocked, version, epoch=2)
        again.append((record.batch_id, ids(record)))
    assert again == [(batch.batch_id, ids(batch)) for batch in (second, third, held)]
    assert first.batch_id not in [batch_id for batch_id, _ in again]


def crashed(updates, *, per_step=4, bound=2, **changes):
    """So many updates without a checkpoint, then what is in flight, issued at the last version; and a learner that
    opens again. Gives the buffer, the batches in order, and the orders in flight."""
    buffer = cases.core(cases.SMALL.model_copy(update={"max_staleness": bound, **changes}))
    version = buffer.open_epoch(None, 0.0)
    batches = []
    for _ in range(updates):
        cases.fill(buffer, version, limit=per_step)
        record, version = cases.step(buffer, version)
        batches.append(record)
    orders = buffer.issue(4, version, 3.0)
    assert buffer.open_epoch(None, 4.0) == PolicyVersion(2, 0)
    return buffer, batches, orders


def test_a_crash_makes_no_rollout_stale():
    """Nine updates after the last checkpoint, a bound of 4: the same batches come in the same order, as fresh as they
    were, and what was in flight is trained after them."""
    buffer, batches, orders = crashed(9, bound=4)
    assert buffer.to_cancel(PolicyVersion(2, 0)) == ()
    for order in orders[:2]:
        buffer.offer(cases.result(order, PolicyVersion(1, 9)), 5.0)
    version = PolicyVersion(2, 0)
    for before in batches:
        again, version = cases.step(buffer, version, epoch=2)
        assert (again.batch_id, again.members) == (before.batch_id, before.members)
        assert buffer.to_cancel(version) == ()
    for order in orders[2:]:
        buffer.offer(cases.result(order, PolicyVersion(1, 9), version), 6.0)
    fresh, _ = cases.step(buffer, version, epoch=2)
    assert ids(fresh) == [order.rollout_id for order in orders]
    assert [member.staleness for member in fresh.members] == [0] * 4
    counters = buffer.status().counters
    assert not {"batches_dissolved", "rollouts_reissued", "attempts_cancelled"} & set(counters)
    assert buffer.state.path.epochs[2].follows == PolicyVersion(1, 9)


def test_a_second_crash_while_repeating_batches_repeats_them_again():
    buffer, batches, _ = crashed(5)
    version = PolicyVersion(2, 0)
    for _ in range(3):
        _, version = cases.step(buffer, version, epoch=2)
    version = buffer.open_epoch(None, 6.0)
    assert version == PolicyVersion(3, 0)
    for before in batches:
        again, version = cases.step(buffer, version, epoch=3)
        assert (again.batch_id, again.members) == (before.batch_id, before.members)
    assert buffer.state.path.epochs[3].follows == PolicyVersion(1, 5)
    assert buffer.state.path.expected_tree.staleness(PolicyVersion(3, 4), PolicyVersion(2, 3)) == 1


def test_engines_may_keep_weights_of_versions_that_will_be_trained_again():
    buffer, _, _ = crashed(3)
    newest, version = PolicyVersion(1, 3), PolicyVersion(2, 0)
    assert buffer.state.path.lies_ahead(newest)
    assert not buffer.state.path.lies_ahead(PolicyVersion(7, 3)), "of another ledger"
    for _ in range(2):
        _, version = cases.step(buffer, version, epoch=2)
        assert buffer.state.path.lies_ahead(newest)
    _, version = cases.step(buffer, version, epoch=2)
    assert not buffer.state.path.lies_ahead(newest), "2.3 has the same weights"


def test_a_step_on_different_batches_is_a_fork():
    """The first batch is skipped when it is trained again: nothing sampled after it is on the line any more."""
    buffer, _, _ = crashed(2, bound=4)
    _, version = cases.step(buffer, PolicyVersion(2, 0), epoch=2, skipped=True)
    assert not buffer.state.path.lies_ahead(PolicyVersion(1, 1))
    _, version = cases.step(buffer, version, epoch=2)
    assert buffer.state.path.epochs[2].follows == FIRST
    assert buffer.state.path.expected_tree.staleness(version, PolicyVersion(1, 2)) == 3, (
        "one update from the fork, and two back to it"
    )


def test_a_batch_skipped_once_is_expected_to_be_skipped_again():
    buffer = cases.core(cases.SMALL)
    version = buffer.open_epoch(None, 0.0)
    cases.fill(buffer, version)
    cases.step(buffer, version, skipped=True)
    cases.step(buffer, version)
    again = buffer.open_epoch(None, 4.0)
    assert buffer.state.path.next_version == PolicyVersion(2, 1)
    assert buffer.state.path.lies_ahead(PolicyVersion(1, 1))
    cases.step(buffer, again, epoch=2, skipped=True)
    assert cases.step(buffer, again, epoch=2)[1] == PolicyVersion(2, 1)
    assert buffer.state.path.epochs[2].follows == PolicyVersion(1, 1)


def test_a_batch_that_depends_on_a_lease_waits_for_its_commit():
    """1.2 is the place of the second of two leases, if the first is not skipped this time."""
    buffer, batches, _ = crashed(3, bound=2)
    leased = [buffer.take(PolicyVersion(2, number), 2, 5.0) for number in range(3)]
    assert [lease and lease.batch_id for lease in leased] == [batches[0].batch_id, batches[1].batch_id, None]
    assert [member.staleness for member in leased[1].members] == [0] * 4
    report = StepReport(batch_id=leased[0].batch_id, version=PolicyVersion(2, 1), skipped=False)
    buffer.commit(cases.lease_of(leased[0]), report, 6.0)
    assert buffer.take(PolicyVersion(2, 2), 2, 7.0).batch_id == batches[2].batch_id


def test_a_batch_loses_only_the_members_that_are_over_the_bound_after_a_fork():
    buffer = cases.core(cases.SMALL.model_copy(update={"max_staleness": 1}))
    buffer.open_epoch(None, 0.0)
    cases.fill(buffer, FIRST, limit=4)
    kept = cases.fill(buffer, FIRST, limit=2)
    _, version = cases.step(buffer, FIRST)
    over = cases.fill(buffer, version, limit=2)
    second, version = cases.step(buffer, version)
    assert ids(second) == [order.rollout_id for order in (*kept, *over)]
    third = cases.fill(buffer, version, limit=4)
    cases.step(buffer, version)
    version = buffer.open_epoch(None, 2.0)
    _, version = cases.step(buffer, version, epoch=2, skipped=True)
    _, version = cases.step(buffer, version, epoch=2)
    assert buffer.take(version, 2, 3.0) is None, "2.1 against 1.2 is three updates"
    again = cases.fill(buffer, version, limit=4)
    assert [(order.rollout_id, order.attempt) for order in again] == [(order.rollout_id, 2) for order in third]
    assert ids(buffer.take(version, 2, 3.0)) == [order.rollout_id for order in third]


def test_reissued_batches_are_taken_before_fresh_ones():
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    cases.fill(buffer, FIRST, limit=4)
    _, version = cases.step(buffer, FIRST)
    saved = cases.checkpoint(buffer, version)
    cases.fill(buffer, version, limit=4)
    undone, version = cases.step(buffer, version)
    fresh = cases.fill(buffer, version, limit=4)
    start = buffer.open_epoch(saved, 4.0)
    again, version = cases.step(buffer, start, epoch=2)
    assert (again.batch_id, ids(again)) == (undone.batch_id, ids(undone))
    assert [member.staleness for member in again.members] == [0] * 4
    after, version = cases.step(buffer, version, epoch=2)
    assert ids(after) == [order.rollout_id for order in fresh]
    assert [member.staleness for member in after.members] == [0] * 4, "2.2 has the weights of 1.2"


def forked(**changes):
    """Two updates, and a fork before them: 1.2 is three updates from 2.1, over the bound of 2, and two from 2.0. Also
    gives the orders that were issued at 1.2."""
    buffer, _, orders = crashed(2, **changes)
    _, version = cases.step(buffer, PolicyVersion(2, 0), epoch=2, skipped=True)
    assert version == PolicyVersion(2, 0)
    return buffer, orders


def test_nothing_is_issued_at_a_version_over_the_bound():
    buffer, orders = forked()
    assert set(buffer.to_cancel(PolicyVersion(2, 0))) == {(order.rollout_id, 1) for order in orders}
    for order in orders:
        buffer.offer(cases.ended(order, Cause.CANCELLED), 5.0)
    assert buffer.issue(8, PolicyVersion(1, 2), 5.0) == (), "the engines still serve the weights of the dead learner"
    assert len(buffer.issue(2, PolicyVersion(1, 1), 5.0)) == 2, "an update back to the fork, and one for the batch"
    assert len(buffer.issue(2, PolicyVersion(2, 0), 5.0)) == 2


@pytest.mark.parametrize("finished", [False, True])
def test_a_rollout_over_the_bound_through_a_fork_is_reissued_without_an_eviction(finished):
    buffer, orders = forked(max_evictions=0)
    for order in orders:
        ended = cases.result(order, PolicyVersion(1, 2)) if finished else cases.ended(order, Cause.CANCELLED)
        buffer.offer(ended, 5.0)
    record, version = cases.step(buffer, PolicyVersion(2, 0), epoch=2)
    assert not {order.rollout_id for order in orders} & set(ids(record))
    assert buffer.take(version, 2, 6.0) is None
    again = buffer.issue(4, version, 6.0)
    assert [(order.rollout_id, order.attempt) for order in again] == [(order.rollout_id, 2) for order in orders]
    assert buffer.status().rollouts[RolloutState.EVICTED] == 0
    assert {buffer.state.rollouts[order.rollout_id].evictions for order in orders} == {0}
    assert all(task.evicted == 0 for task in buffer.state.tasks.values())


def test_a_slow_rollout_that_spans_a_crash_counts_as_evicted():
    """It went over the bound by the updates made meanwhile, and by no fork: that counts."""
    buffer = cases.core(cases.SMALL.model_copy(update={"max_staleness": 3}))
    version = buffer.open_epoch(None, 0.0)
    orders = buffer.issue(2, version, 0.0)
    for epoch in (1, 2):
        for _ in range(2):
            cases.fill(buffer, version, limit=4)
            _, version = cases.step(buffer, version, epoch=epoch)
        if epoch == 1:
            saved = cases.checkpoint(buffer, version)
            version = buffer.open_epoch(saved, 3.0)
    assert set(buffer.to_cancel(version)) == {(order.rollout_id, 1) for order in orders}
    for order in orders:
        buffer.offer(cases.ended(order, Cause.CANCELLED), 5.0)
    assert {buffer.state.rollouts[order.rollout_id].evictions for order in orders} == {1}


def learner_dies(buffer, version, epoch):
    """In the step on the next batch; the version after the next learner opened."""
    batch = buffer.take(version, epoch, 2.0)
    return batch, buffer.open_epoch(None, 3.0)


def test_a_batch_that_kills_the_learner_twice_is_no_longer_issued(stocked):
    batch, version = learner_dies(stocked, FIRST, 1)
    again, version = learner_dies(stocked, version, 2)
    assert (again.batch_id, again.tries) == (batch.batch_id, 2)
    before = stocked.drain()
    with pytest.raises(BatchUntrainable, match=r"b000001 was tried 2 times.*died in the step.*--drop-batch b000001"):
        stocked.take(version, 3, 4.0)
    assert before
    assert stocked.drain() == ()
    stocked.operators.drop_batch(batch.batch_id, 5.0)
    assert stocked.take(version, 3, 6.0).batch_id != batch.batch_id


def test_the_reason_for_a_failed_step_is_recorded_and_an_in_place_retry_counts_as_an_attempt(stocked):
    lease = cases.lease_of(stocked.take(FIRST, 1, 2.0))
    assert stocked.batches.step_failed(lease, "RowUnusable: row 3 of g000001-0\ud800", again=True) == ""
    verdict = stocked.batches.step_failed(lease, "RowUnusable: row 3 of g000001-0", again=True)
    assert "b000001 was tried 2 times without success: RowUnusable: row 3 of g000001-0. Leave it out" in verdict
    version = stocked.open_epoch(None, 3.0)
    with pytest.raises(BatchUntrainable, match="row 3 of g000001-0"):
        stocked.take(version, 2, 4.0)
    stocked.operators.retry_batches()
    assert stocked.take(version, 2, 4.0).tries == 1


def test_an_attempt_is_counted_only_for_the_batch_being_trained(stocked):
    """Of two leases the first; not after a release or an interruption; not once another step ended a learner, or this
    one went well."""
    first, second = stocked.take(FIRST, 1, 2.0), stocked.take(PolicyVersion(1, 1), 1, 2.0)
    stocked.open_epoch(None, 3.0)
    assert [batch.tries for batch in stocked.state.path.queue()] == [1, 0]
    lease = cases.lease_of(stocked.take(PolicyVersion(2, 0), 2, 4.0))
    stocked.batches.step_interrupted(lease)
    assert stocked.state.path.batches[first.batch_id].tries == 1
    stocked.batches.release(lease)
    assert stocked.state.path.batches[first.batch_id].tries == 0
    _, version = cases.step(stocked, PolicyVersion(2, 0), epoch=2)
    assert stocked.state.path.batches[first.batch_id].tries == 0
    died_on, version = learner_dies(stocked, version, 2)
    assert died_on.batch_id == second.batch_id
    _, version = learner_dies(stocked, version, 3)
    assert {batch.batch_id: batch.tries for batch in stocked.state.path.queue()} == {
        first.batch_id: 1,
        second.batch_id: 0,
    }


def test_versions_are_never_reused_when_nothing_was_saved(stocked):
    cases.step(stocked, FIRST)
    assert stocked.open_epoch(None, 5.0) == PolicyVersion(2, 0)
    assert stocked.open_epoch(None, 6.0) == PolicyVersion(3, 0)
    assert stocked.state.path.tree.staleness(PolicyVersion(3, 1), PolicyVersion(1, 1)) == 2


def test_a_ledger_behind_the_checkpoint_is_refused(stocked):
    _, version = cases.step(stocked, FIRST)
    saved = cases.checkpoint(stocked, version)
    fresh = cases.core()
    fresh.open_epoch(None, 0.0)
    fresh.drain()
    with pytest.raises(LedgerBehind, match="has not committed"):
        fresh.open_epoch(saved, 1.0)
    assert fresh.drain() == ()
    with pytest.raises(LedgerMismatch, match="was trained on other batches"):
        stocked.open_epoch(replace(saved, chain="00" * 32), 1.0)
    with pytest.raises(LedgerMismatch, match="but the ledger has another there"):
        stocked.open_epoch(replace(saved, version=PolicyVersion(1, 7)), 1.0)


def test_a_checkpoint_on_an_undone_path_is_refused(stocked):
    _, version = cases.step(stocked, FIRST)
    dead = cases.checkpoint(stocked, version)
    stocked.open_epoch(None, 1.0)
    with pytest.raises(CheckpointLate):
        stocked.open_epoch(dead, 2.0)
    cases.step(stocked, PolicyVersion(2, 0), epoch=2)
    with pytest.raises(CheckpointLate, match="was finished after another learner had taken over"):
        stocked.open_epoch(dead, 3.0)
    assert stocked.state.path.epoch == 2


def test_a_checkpoint_that_an_epoch_passed_over_is_not_late(stocked):
    """Epoch 2 was opened at 1.2, so 1.1 existed then: its contents are wrong for another reason."""
    _, version = cases.step(stocked, FIRST)
    older = cases.checkpoint(stocked, version)
    _, version = cases.step(stocked, version)
    stocked.open_epoch(cases.checkpoint(stocked, version), 1.0)
    with pytest.raises(LedgerMismatch, match="was trained on other batches") as refused:
        stocked.open_epoch(replace(older, chain="00" * 32), 2.0)
    assert not isinstance(refused.value, CheckpointLate)


def test_epochs_that_a_lost_ledger_may_have_opened_are_not_opened_again(stocked):
    _, version = cases.step(stocked, FIRST)
    saved = cases.checkpoint(stocked, version)
    stocked.state.count(EPOCHS_RESERVED, 104)
    with pytest.raises(CheckpointLate):
        stocked.open_epoch(replace(saved, chain="00" * 32, version=PolicyVersion(3, 9)), 1.0)
    assert stocked.open_epoch(None, 1.0) == PolicyVersion(105, 0)
    assert stocked.open_epoch(None, 2.0) == PolicyVersion(106, 0)


def test_a_checkpoint_at_the_start_of_an_epoch_is_accepted(stocked):
    _, version = cases.step(stocked, FIRST)
    start = stocked.open_epoch(cases.checkpoint(stocked, version), 1.0)
    assert start == PolicyVersion(2, 1)
    saved = cases.checkpoint(stocked, start)
    stocked.epochs.checkpointed(saved, 2.0)
    stocked.epochs.checkpointed(saved, 2.0)
    assert stocked.open_epoch(saved, 3.0) == PolicyVersion(3, 1)


def test_covered_groups_are_forgotten_but_counted(stocked):
    version = FIRST
    for _ in range(3):
        record, version = cases.step(stocked, version)
    before = stocked.status().rollouts
    stocked.epochs.checkpointed(cases.checkpoint(stocked, version), 4.0)
    assert stocked.state.rollouts == {}
    assert stocked.state.path.batches == {}
    assert stocked.status().rollouts == before
    late = cases.result(SimpleNamespace(rollout_id=record.members[0].rollout_id, attempt=1), FIRST)
    assert stocked.offer(late, 5.0).status == "late"
    assert stocked.epochs.needs_history(None)
    with pytest.raises(LedgerMismatch, match="archive"):
        stocked.open_epoch(None, 6.0, from_start=True)
