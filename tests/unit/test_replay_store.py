"""The async shell: durable before answered, group commit, waiting, ending on failure."""

from __future__ import annotations

import asyncio
import builtins
import math
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.records import RolloutState
from headrace.buffer.core.sealing import Sealing
from headrace.buffer.errors import DataExhausted, LeaseError, LedgerBroken, StaleEpoch
from headrace.buffer.ledger.ledger import Ledger
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.sanitizer import MAX_TEXT
from headrace.buffer.trajectories.types import Cause, CheckpointRef, Outcome, ReceiptStatus, RolloutId, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
GUARD_S = 20.0


async def open_store(run_dir, **changes):
    config = cases.SMALL.model_copy(update=changes)
    return await ReplayStore.open(run_dir, config, cases.tasks(), run_id="run", seed=3, clock=lambda: 100.0)


async def fill(store, version, limit=1000):
    orders = await store.issue(limit, version)
    rewards = [float(position % 2) for position in range(len(orders))]
    return await store.offer_many(
        [cases.result(order, version, reward=reward) for order, reward in zip(orders, rewards, strict=True)]
    )


async def step(store, version):
    batch = await store.take(version, version.epoch, timeout_s=GUARD_S)
    after = PolicyVersion(version.epoch, version.step + 1)
    await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
    return batch, after


@pytest.mark.parametrize("in_memory", [True, False])
async def test_a_batch_contains_the_offered_trajectories(tmp_path, in_memory):
    async with await open_store(None if in_memory else tmp_path) as store:
        assert await store.open_epoch(None) == FIRST
        assert {receipt.status for receipt in await fill(store, FIRST)} == {ReceiptStatus.ACCEPTED}
        batch, after = await step(store, FIRST)
        assert len(batch.items) == 4
        assert [item.reward for item in batch.items] == [0.0, 1.0, 0.0, 1.0]
        assert batch.items[1].advantage == pytest.approx(0.5 / math.sqrt(0.5), abs=1e-4)
        assert batch.items[0].trajectory.rows[0].versions[0].version == FIRST
        assert store.status().head == after
        chain = store.status().chain
    assert bytes.fromhex(chain)


async def test_acknowledged_results_are_on_disk(tmp_path):
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        (receipt, *_) = await fill(store, FIRST)
        with closing(sqlite3.connect(f"{(tmp_path / 'ledger.db').as_uri()}?mode=ro", uri=True)) as reader:
            row = reader.execute("SELECT offered FROM attempts WHERE rollout_id = ?", (receipt.rollout_id,)).fetchone()
        assert row == (1,)


async def test_concurrent_calls_share_a_transaction(tmp_path, monkeypatch):
    writes = []
    write = Ledger.write

    def counted(self, changes, trajectories):
        writes.append(len(changes))
        write(self, changes, trajectories)

    monkeypatch.setattr(Ledger, "write", counted)
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        orders = await store.issue(1000, FIRST)
        writes.clear()
        async with asyncio.TaskGroup() as group:
            for order in orders:
                group.create_task(store.offer_many([cases.result(order, FIRST)]))
        assert len(orders) == 12
        assert len(writes) <= 3, "the first call's own, then one for all who waited"


async def test_a_take_waits_for_a_batch_until_its_timeout(tmp_path):
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        assert await store.take(FIRST, 1, timeout_s=0.0) is None
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(store.take(FIRST, 1, timeout_s=GUARD_S))
            await asyncio.sleep(0)
            group.create_task(fill(store, FIRST))
        batch = waiting.result()
        assert batch.version == FIRST
        again = await store.take(FIRST, 1, timeout_s=0.0)
        assert again.lease == batch.lease


async def test_a_dead_learners_waiting_take_is_fenced(tmp_path):
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(asyncio.wait_for(_fenced(store), GUARD_S))
            await asyncio.sleep(0)
            assert await store.open_epoch(None) == PolicyVersion(2, 0)
        assert waiting.result()


async def _fenced(store):
    with pytest.raises(StaleEpoch):
        await store.take(FIRST, 1, timeout_s=GUARD_S)
    return True


async def test_issuing_waits_for_free_inventory(tmp_path):
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        await fill(store, FIRST)
        assert await store.issue(4, FIRST) == ()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(store.issue(4, FIRST, timeout_s=GUARD_S))
            await asyncio.sleep(0)
            group.create_task(step(store, FIRST))
        assert len(waiting.result()) == 4


async def test_a_waiting_take_returns_when_a_group_is_due():
    config = cases.SMALL.model_copy(update={"rule": "deadline(0.05)", "group_size": 4})
    store = await ReplayStore.open(None, config, cases.tasks(), run_id="run", seed=3)
    async with store, asyncio.timeout(GUARD_S):
        await store.open_epoch(None)
        orders = await store.issue(8, FIRST)
        await store.offer_many([cases.result(order, FIRST) for order in (*orders[:2], *orders[4:6])])
        batch = await store.take(FIRST, 1, timeout_s=10 * GUARD_S)
        assert [item.rollout_id for item in batch.items] == [o.rollout_id for o in (*orders[:2], *orders[4:6])]
        assert store.status().inventory.in_flight == 4, "carried"


@pytest.mark.parametrize("rule", ["deadline(60)", "count(2) & grace(60)"])
async def test_downtime_does_not_count_as_a_groups_waiting_time(tmp_path, rule):
    config = cases.SMALL.model_copy(update={"rule": rule, "group_size": 4, "unfinished": "abort"})
    now = 1000.0

    async def opened():
        return await ReplayStore.open(tmp_path, config, cases.tasks(), run_id="run", seed=3, clock=lambda: now)

    async with await opened() as store:
        await store.open_epoch(None)
        orders = await store.issue(4, FIRST)
        await store.offer_many([cases.result(order, FIRST) for order in orders[:2]])
    for stop_s in (3600.0, -7200.0):
        now += stop_s
        async with await opened() as store:
            await store.keep_in_flight(())
            again = await store.issue(2, FIRST)
            assert [order.rollout_id for order in again] == [order.rollout_id for order in orders[2:]]
            now += 59.0
            assert await store.cancellations([], timeout_s=0.0) is None
    now += 3600.0
    async with await opened() as store:
        now += 60.0
        assert set(await store.cancellations([], timeout_s=0.0) or ()) == {
            (order.rollout_id, order.attempt) for order in again
        }
        now += 3600.0
    async with await opened() as store:
        assert store.status().rollouts[RolloutState.CANCELLED] == 2, "what was sealed stays sealed"
    assert verify(tmp_path).clean


async def test_cancellations_are_reported_immediately_and_once():
    config = cases.SMALL.model_copy(update={"group_size": 4, "rule": "count(3)", "unfinished": "abort"})
    store = await ReplayStore.open(None, config, cases.tasks(), run_id="run", seed=3)
    async with store, asyncio.timeout(GUARD_S):
        await store.open_epoch(None)
        orders = await store.issue(8, FIRST)
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(store.cancellations([], timeout_s=10 * GUARD_S))
            await asyncio.sleep(0)
            group.create_task(store.offer_many([cases.result(order, FIRST) for order in orders[:3]]))
        left_out = (orders[3].rollout_id, 1)
        assert waiting.result() == (left_out,)
        assert await store.cancellations([left_out], timeout_s=0.0) is None
        await store.offer_many([cases.result(order, FIRST) for order in orders[4:7]])
        assert await store.cancellations([left_out], timeout_s=0.0) == (left_out, (orders[7].rollout_id, 1))


async def test_a_waiting_take_raises_when_the_data_ends():
    config = cases.SMALL.model_copy(update={"passes": 1, "rule": "count(2)", "unfinished": "abort"})
    store = await ReplayStore.open(None, config, cases.tasks(1), run_id="run", seed=3)
    async with store, asyncio.timeout(GUARD_S):
        await store.open_epoch(None)
        orders = await store.issue(8, FIRST)
        assert len(orders) == 2
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(_exhausted(store))
            await asyncio.sleep(0)
            group.create_task(store.offer_many([cases.result(order, FIRST) for order in orders]))
        assert "2 rollouts are left over" in waiting.result()
        assert store.status().rollouts[RolloutState.SEALED] == 2, "the store goes on"


async def _exhausted(store):
    with pytest.raises(DataExhausted) as caught:
        await store.take(FIRST, 1, timeout_s=10 * GUARD_S)
    return str(caught.value)


async def test_orders_that_no_worker_received_become_new_attempts(tmp_path):
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        issuing = asyncio.ensure_future(store.issue(2, FIRST))
        await asyncio.sleep(0)
        issuing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await issuing
        orders = await store.issue(2, FIRST)
        assert [order.attempt for order in orders] == [2, 2]


async def test_a_write_error_stops_the_store_for_all_callers(tmp_path):
    store = await open_store(tmp_path)
    await store.open_epoch(None)
    orders = await store.issue(2, FIRST)
    waiting = asyncio.ensure_future(store.take(FIRST, 1, timeout_s=GUARD_S))
    await asyncio.sleep(0)
    await store._writer.in_thread(lambda: store._writer.ledger._database.execute("PRAGMA query_only = ON"))
    with pytest.raises(LedgerBroken, match="readonly"):
        await store.offer_many([cases.result(order, FIRST) for order in orders])
    with pytest.raises(LedgerBroken):
        await waiting
    for call in (store.status, lambda: store.head):
        with pytest.raises(LedgerBroken):
            call()
    with pytest.raises(LedgerBroken):
        await store.issue(1, FIRST)
    await store.aclose()
    async with await open_store(tmp_path) as again:
        assert again.status().rollouts[RolloutState.IN_FLIGHT] == 2
        receipts = await again.offer_many([cases.result(order, FIRST) for order in orders])
        assert {receipt.status for receipt in receipts} == {ReceiptStatus.ACCEPTED}


def every_exception() -> list[type[Exception]]:
    """Each subclass of Exception that Python has without an import."""
    kinds = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    return sorted(set(kinds), key=lambda kind: kind.__name__)


def made(kind: type[Exception]) -> Exception:
    if issubclass(kind, UnicodeError) and kind is not UnicodeError:
        text = b"" if kind is UnicodeDecodeError else ""
        return kind(*(("utf-8", text) if kind is not UnicodeTranslateError else (text,)), 0, 1, "it broke")
    return kind("it broke", [ValueError()]) if issubclass(kind, ExceptionGroup) else kind("it broke")


@pytest.mark.parametrize(
    ("kind", "in_memory"),
    [
        *((kind, False) for kind in (*every_exception(), sqlite3.ProgrammingError, LeaseError)),
        (StopIteration, True),
        (UnicodeEncodeError, True),
    ],
)
async def test_any_exception_in_a_write_stops_the_store_without_losing_anything(tmp_path, monkeypatch, kind, in_memory):
    """What the core was drained of is gone with it; the next store is folded from the disk."""
    write = Ledger.write

    def broken(ledger, changes, trajectories):
        write(ledger, changes[:1], [])
        raise made(kind)

    store = await open_store(None if in_memory else tmp_path)
    async with asyncio.timeout(GUARD_S):
        await store.open_epoch(None)
        orders = await store.issue(4, FIRST)
        waiting = asyncio.ensure_future(store.take(FIRST, 1, timeout_s=10 * GUARD_S))
        await asyncio.sleep(0)
        monkeypatch.setattr(Ledger, "write", broken)
        with pytest.raises(LedgerBroken, match="the ledger failed"):
            await store.offer_many([cases.result(order, FIRST) for order in orders])
        with pytest.raises(LedgerBroken):
            await waiting
        with pytest.raises(LedgerBroken):
            store.status()
        monkeypatch.undo()
        await store.aclose()
    if in_memory:
        return
    async with await open_store(tmp_path) as again:
        assert again.status().rollouts[RolloutState.IN_FLIGHT] == 4, "nothing was acknowledged"
        receipts = await again.offer_many([cases.result(order, FIRST) for order in orders])
        assert {receipt.status for receipt in receipts} == {ReceiptStatus.ACCEPTED}
    assert verify(tmp_path).clean


async def test_the_core_is_not_used_after_an_interrupted_change(tmp_path, monkeypatch):
    def breaks_off(sealing, now):
        raise KeyError("a defect")

    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        (order,) = await store.issue(1, FIRST)
        waiting = asyncio.ensure_future(store.take(FIRST, 1, timeout_s=10 * GUARD_S))
        await asyncio.sleep(0)
        monkeypatch.setattr(Sealing, "tick", breaks_off)
        with pytest.raises(LedgerBroken, match=r"halfway .*a defect"):
            await store.offer_many([cases.result(order, FIRST)])
        with pytest.raises(LedgerBroken):
            await asyncio.wait_for(waiting, GUARD_S)
        with pytest.raises(LedgerBroken, match="halfway"):
            store.status()


SPOILED = {
    "a lone surrogate": {"outcome": Outcome.infra('{"error": "\ud800"}')},
    "a number of 65 bits": {"turns": 1 << 64},
    "a negative number": {"turns": -1},
    "no number": {"turns": "many"},
    "a number of numpy": {"turns": np.int64(3)},
    "seconds of numpy": {"phases_s": (("boot", np.float32(0.5)), ("\ud800", np.int64(2)))},
    "endless seconds": {"phases_s": (("boot", float("inf")),)},
    "a huge whole number of seconds": {"phases_s": (("boot", 10**400),)},
    "a text of two megabytes": {"trace_id": "x" * 2_000_000},
    "a surrogate in the trace id": {"trace_id": "\udcff"},
    "a reward that squares to infinity": {"outcome": Outcome(reward=1e200, trainable=True, cause=Cause.FAILED)},
    "a reward of numpy": {"outcome": Outcome(reward=np.float32(0.0), trainable=np.bool_(True), cause=Cause.FAILED)},
    "a cause of others": {"outcome": Outcome(reward=0.0, trainable=True, cause="bored")},
    "no outcome": {"outcome": None},
}


@pytest.mark.parametrize("spoiled", SPOILED)
async def test_a_result_that_cannot_be_stored_does_not_affect_the_others(tmp_path, spoiled):
    """Eight results in one transaction: at worst the spoiled one is an infra failure."""
    clean = ("of numpy", "surrogate", "megabytes")
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        orders = await store.issue(8, FIRST)
        results = [cases.result(order, FIRST, reward=0.0) for order in orders]
        results[3] = replace(results[3], **SPOILED[spoiled])
        async with asyncio.TaskGroup() as group:
            offers = [group.create_task(store.offer_many([result])) for result in results]
        assert {offer.result()[0].status for offer in offers} == {ReceiptStatus.ACCEPTED}
        assert sum(store.status().rollouts.values()) == 8
    attempts = {attempt.rollout_id: attempt for attempt in read_evidence(tmp_path).attempts}
    assert [attempts[order.rollout_id].offered for order in orders] == [True] * 8
    assert max(len(attempt.trace_id) for attempt in attempts.values()) <= MAX_TEXT
    infra = [order.rollout_id for order in orders if attempts[order.rollout_id].cause is Cause.INFRA]
    expected = [] if any(word in spoiled for word in clean) and "lone" not in spoiled else [orders[3].rollout_id]
    assert infra == expected
    assert verify(tmp_path).clean
    async with await open_store(tmp_path) as store:
        version = await store.open_epoch(None)
        batch = await store.take(version, 2, timeout_s=0.0)
        assert len(batch.items) == 4


@pytest.mark.parametrize(
    ("metrics", "kept"),
    [
        ({"loss": np.float32(0.5), "tokens": np.int64(7)}, {"loss": 0.5, "tokens": 7.0}),
        ({"loss": 10**400, "who": "nobody", "tensor": np.zeros(3), "ok": 1}, {"ok": 1.0}),
        ({"\ud800": 1.0, 5: 2.0}, {"?": 1.0, "5": 2.0}),
        (None, {}),
    ],
)
async def test_a_step_is_recorded_whatever_its_metrics(tmp_path, metrics, kept):
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        await fill(store, FIRST)
        batch = await store.take(PolicyVersion(np.int64(1), np.int64(0)), np.int64(1), timeout_s=GUARD_S)
        after = PolicyVersion(np.int64(1), np.int64(1))
        report = StepReport(batch_id=batch.lease.batch_id, version=after, skipped=np.bool_(False), metrics=metrics)
        await store.commit(batch.lease, report)
        chain = store.status().chain
        path = str(b"/runs/\xff/1.1", "utf-8", "surrogateescape")
        ref = CheckpointRef(path=path, version=after, batch_ids=(batch.lease.batch_id,), chain=chain)
        await store.checkpointed(ref)
        await store.open_epoch(ref)
    (commit,) = read_evidence(tmp_path).commits
    assert commit.metrics == kept
    report = verify(tmp_path)
    assert (report.problems, report.steps) == ((), 1)


async def test_recorded_evaluations_survive_a_restart(tmp_path):
    async with await open_store(tmp_path) as store:
        await store.open_epoch(None)
        (order,) = await store.issue(1, FIRST)
        done = replace(cases.result(order, FIRST), rollout_id=RolloutId("eval-1"))
        (receipt,) = await store.evaluations.record([(done, order.task_id)], tag="base", version=FIRST)
        assert receipt.status is ReceiptStatus.ACCEPTED
    async with await open_store(tmp_path) as store:
        (receipt,) = await store.evaluations.record([(done, order.task_id)], tag="base", version=FIRST)
        assert receipt.status is ReceiptStatus.DUPLICATE


async def test_returning_to_an_older_checkpoint_undoes_closed_groups(tmp_path):
    async with await open_store(tmp_path) as store:
        version = await store.open_epoch(None)
        saved, trained = [], []
        for _ in range(3):
            await fill(store, version)
            batch, version = await step(store, version)
            trained.append([item.rollout_id for item in batch.items])
            ref = CheckpointRef(
                path="somewhere", version=version, batch_ids=(batch.lease.batch_id,), chain=store.status().chain
            )
            await store.checkpointed(ref)
            saved.append(ref)
        before = store.status().rollouts
    async with await open_store(tmp_path) as store:
        assert store.status().rollouts == before
        version = await store.open_epoch(saved[0])
        assert version == PolicyVersion(2, 1)
        again, version = await step(store, version)
        assert [item.rollout_id for item in again.items] == trained[1]
    report = verify(tmp_path)
    assert report.problems == ()
    assert (report.steps, report.steps_rolled_back, report.trained) == (2, 2, 8)


async def test_a_cancelled_callers_change_wakes_waiting_callers(tmp_path, monkeypatch):
    writing, may_write = threading.Event(), threading.Event()
    write = Ledger.write

    def slow_write(ledger, *arguments):
        writing.set()
        may_write.wait(GUARD_S)
        return write(ledger, *arguments)

    async with await open_store(tmp_path) as store, asyncio.timeout(GUARD_S):
        await store.open_epoch(None)
        orders = await store.issue(1000, FIRST)
        assert await store.issue(4, FIRST) == ()
        async with asyncio.TaskGroup() as group:
            waiting = group.create_task(store.issue(4, FIRST, timeout_s=10 * GUARD_S))
            await asyncio.sleep(0)
            monkeypatch.setattr(Ledger, "write", slow_write)
            keys = [(order.rollout_id, order.attempt) for order in orders]
            leaving = group.create_task(store.abandon(keys))
            await asyncio.to_thread(writing.wait, GUARD_S)
            leaving.cancel()
            may_write.set()
        assert {order.attempt for order in waiting.result()} == {2}
