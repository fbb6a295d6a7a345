"""Several sources of tasks in the replay buffer's core: quotas, admission, resumes, and exhausted sources."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.curriculum import TaskStream
from headrace.buffer.core.records import BatchRecord, RolloutState, Snapshot
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.core.source_names import source_name
from headrace.buffer.core.task_sources.shares import Mix, Source
from headrace.buffer.errors import DataExhausted, LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.types import Cause, CheckpointRef, RolloutOrder, StepReport, extend_chain
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
CONFIG = BufferConfig(batch_size=8, group_size=2, max_staleness=2)
MORE = CONFIG.model_copy(update={"group_size": 4, "advantage": "leave_one_out", "zero_variance": "filter"})
SOURCES = (Source(name="a", share=0.6, config=CONFIG), Source(name="b", share=0.4, config=MORE))


def tasks(count: int = 12) -> list[Task]:
    return [replace(task, id=TaskId(f"{source}/{task.id}")) for source in "ab" for task in cases.tasks(count)]


def core(config: BufferConfig = CONFIG, sources: Sequence[Source] = SOURCES, count: int = 12) -> ReplayBuffer:
    buffer = ReplayBuffer(config, TaskStream(tasks(count), seed=3), sources=sources)
    buffer.open_epoch(None, 0.0)
    return buffer


def finish(buffer: ReplayBuffer, orders: Sequence[RolloutOrder], version: PolicyVersion, now: float = 1.0) -> None:
    for position, order in enumerate(orders):
        buffer.offer(cases.result(order, version, reward=float(position % 2)), now)


def sources_of(buffer: ReplayBuffer, batch: BatchRecord) -> dict[str, int]:
    names = [buffer.state.source_of(buffer.state.rollouts[member.rollout_id]) for member in batch.members]
    return {name: names.count(name) for name in "ab"}


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.integers(1, 30), min_size=1, max_size=6), size=st.integers(1, 64))
def test_the_rollouts_given_differ_from_the_shares_by_less_than_one(weights: list[int], size: int) -> None:
    """If every source has a part of at least one rollout in each batch."""
    shares = [weight / sum(weights) for weight in weights]
    if min(shares) * size < 1:
        return
    mix = Mix(CONFIG, [Source(name=f"s{place}", share=share, config=CONFIG) for place, share in enumerate(shares)])
    given_ = {source.name: 0 for source in mix.sources}
    for batch in range(1, 40):
        quotas = mix.quotas(given_, size)
        assert sum(quotas.values()) == size
        assert min(quotas.values()) >= 0
        given_ = {name: number + quotas[name] for name, number in given_.items()}
        assert all(abs(given_[one.name] - one.share * batch * size) < 1 for one in mix.sources)


def test_quotas_make_up_for_what_a_source_lacks_so_far() -> None:
    mix = Mix(CONFIG, SOURCES)
    assert mix.quotas({"a": 0, "b": 0}, 10) == {"a": 6, "b": 4}
    assert mix.quotas({"a": 8, "b": 2}, 10) == {"a": 4, "b": 6}
    assert mix.quotas({"a": 40, "b": 0}, 10) == {"a": 0, "b": 10}


def test_a_run_without_sources_has_one_that_fills_its_batches() -> None:
    mix = Mix(CONFIG)
    assert (mix.is_named, mix.quotas({"": 17}, 8), mix.config_of(TaskId("x/1"))) == (False, {"": 8}, CONFIG)
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    cases.fill(buffer, FIRST)
    cases.step(buffer, FIRST)
    assert not [name for name in buffer.state.counters if "/" in name], "the ledger is as it was"


def test_a_batch_waits_for_the_quota_of_every_source() -> None:
    buffer = core()
    orders = buffer.issue(100, FIRST, 0.0)
    by_source = {name: [order for order in orders if source_name(order.task_id) == name] for name in "ab"}
    finish(buffer, by_source["a"], FIRST)
    assert buffer.take(FIRST, 1, 2.0) is None, "only one source has delivered"
    assert buffer.batches.waits_for() == {"b": 3}
    assert buffer.status().sources["b"].lacking == 3
    finish(buffer, by_source["b"], FIRST)
    batch = buffer.take(FIRST, 1, 2.0)
    assert batch is not None
    assert sources_of(buffer, batch) == {"a": 5, "b": 3}


def test_each_source_has_its_own_group_size_advantages_and_filter() -> None:
    buffer = core()
    orders = buffer.issue(100, FIRST, 0.0)
    sizes: dict[str, set[int]] = {name: set() for name in "ab"}
    for group in buffer.state.groups.values():
        sizes[source_name(group.task_id)].add(len(buffer.state.members[group.group_id]))
    assert sizes == {"a": {2}, "b": {4}}
    for order in orders:
        buffer.offer(cases.result(order, FIRST, reward=1.0), 1.0)
    kinds = {source_name(group.task_id): group.advantage for group in buffer.state.groups.values()}
    assert kinds == {"a": "grpo", "b": "leave_one_out"}
    assert buffer.state.stock["b"][RolloutState.FILTERED] > 0 == buffer.state.stock["a"][RolloutState.FILTERED]


def test_no_source_fills_the_stock_of_another() -> None:
    buffer = core()
    orders = buffer.issue(100, FIRST, 0.0)
    issued = [source_name(order.task_id) for order in orders]
    # Room for 24 rollouts, whole groups: 14.4 of a and 9.6 of b.
    assert (issued.count("a"), issued.count("b"), buffer.admit()) == (14, 8, 0)


def test_a_source_that_loses_rollouts_starts_more_of_them() -> None:
    """Its yield lowers what its rollouts in progress count for."""
    buffer = core(count=60)
    version = FIRST
    for _ in range(12):
        orders = buffer.issue(200, version, 0.0)
        for order in orders:
            lost = source_name(order.task_id) == "b" and int(order.group_id[1:]) % 3
            buffer.offer(cases.result(order, version, reward=1.0 if lost else float(order.rollout_id[-1] in "02")), 1.0)
        if buffer.batches.waits_for():
            continue
        _, version = cases.step(buffer, version)
    status = buffer.status().sources
    assert status["a"].usable == 1.0
    assert 0.25 <= status["b"].usable < 0.8
    assert status["b"].realised == pytest.approx(0.4, abs=0.02)


def test_a_source_that_fails_gets_one_probe_a_minute_and_the_others_go_on() -> None:
    buffer, now = core(count=60), 0.0
    while "b" not in buffer.outages.failing_sources():
        now += 1.0
        for order in buffer.issue(100, FIRST, now):
            of_b = source_name(order.task_id) == "b"
            buffer.offer(cases.ended(order, Cause.INFRA) if of_b else cases.result(order, FIRST), now)
    assert now < 20
    assert buffer.status().held == "", "the system as a whole works"
    [probe] = buffer.issue(100, FIRST, now)
    assert source_name(probe.task_id) == "b"
    assert (buffer.issue(100, FIRST, now + 1), buffer.outages.wakes_at(now + 1)) == ((), now + 60)
    buffer.offer(cases.ended(probe, Cause.INFRA), now + 2)
    [probe] = buffer.issue(100, FIRST, now + 60)
    assert "attempts failed" in buffer.status().sources["b"].failing
    buffer.offer(cases.result(probe, FIRST), now + 61)
    assert buffer.outages.failing_sources() == {}, "the probe has succeeded"
    assert len(buffer.issue(100, FIRST, now + 61)) > 1


def test_a_source_whose_data_is_used_up_ends_the_run_by_name() -> None:
    once = CONFIG.model_copy(update={"passes": 1})
    few = [replace(task, id=TaskId(f"a/{task.id}")) for task in cases.tasks(12)]
    few += [replace(task, id=TaskId(f"b/{task.id}")) for task in cases.tasks(1)]
    buffer = ReplayBuffer(once, TaskStream(few, seed=3), sources=SOURCES)
    buffer.open_epoch(None, 0.0)
    finish(buffer, buffer.issue(100, FIRST, 0.0), FIRST)
    _, version = cases.step(buffer, FIRST)
    finish(buffer, buffer.issue(100, version, 1.0), version)
    with pytest.raises(DataExhausted, match=r"source b is used up: 1 rollouts are left over, but a batch needs 3"):
        buffer.take(version, 1, 2.0)


def test_a_source_without_tasks_is_refused() -> None:
    with pytest.raises(ValueError, match="source b has no training tasks"):
        ReplayBuffer(CONFIG, TaskStream([task for task in tasks() if task.id[0] == "a"], seed=3), sources=SOURCES)


async def train(run_dir: Path, *, lives: Sequence[int], saves: Sequence[int] = ()) -> list[tuple[str, ...]]:
    """Lives of one run, which end after these steps without saving, each continued from the newest checkpoint. Returns
    the rollouts of each step of the surviving path."""
    newest: CheckpointRef | None = None
    for last in lives:
        store = await ReplayStore.open(
            run_dir, CONFIG, tasks(), run_id="run", seed=3, clock=lambda: 100.0, sources=SOURCES
        )
        async with store:
            version = await store.open_epoch(newest)
            chain, batch_ids = (newest.chain, newest.batch_ids) if newest else ("", ())
            while version.step < last:
                orders = await store.issue(100, version)
                await store.offer_many(
                    [cases.result(order, version, reward=float(order.rollout_id[-1] in "02")) for order in orders]
                )
                batch = await store.take(version, version.epoch, timeout_s=1.0)
                assert batch is not None
                version = PolicyVersion(version.epoch, version.step + 1)
                report = StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False)
                await store.commit(batch.lease, report)
                chain, batch_ids = extend_chain(chain, batch.digest()), (*batch_ids, batch.lease.batch_id)
                if version.step in saves:
                    path = str(run_dir / f"c{version}")
                    newest = CheckpointRef(path=path, version=version, batch_ids=batch_ids, chain=chain)
                    await store.checkpointed(newest)
    report = verify(run_dir)
    # The checkpoints are only recorded here: no directory of theirs exists.
    assert not [problem for problem in report.problems if "counter" in problem or "size" in problem], report.problems
    evidence = read_evidence(run_dir)
    batches = {batch.batch_id: batch for batch in evidence.batches}
    return [tuple(m.rollout_id for m in batches[commit.batch_id].members) for commit in evidence.surviving]


async def test_a_resumed_run_trains_the_same_batches(tmp_path: Path) -> None:
    """A crash undoes steps after the checkpoint, whose rollouts then no longer count as trained; closed groups of
    earlier ones still count."""
    whole = await train(tmp_path / "whole", lives=[14], saves=[3, 6, 9])
    resumed = await train(tmp_path / "resumed", lives=[5, 8, 14], saves=[3, 6, 9])
    assert len(whole) == 14
    assert whole == resumed


async def test_the_counters_of_a_ledger_are_verified(tmp_path: Path) -> None:
    await train(tmp_path / "run", lives=[4])
    with closing(sqlite3.connect(tmp_path / "run" / "ledger.db")) as database, database:
        database.execute("UPDATE counters SET value = value + 1 WHERE name = 'a/trained'")
    assert any("counter a/trained is 20, but the ledger has 19" in one for one in verify(tmp_path / "run").problems)


async def test_a_ledger_of_other_shares_is_refused(tmp_path: Path) -> None:
    await train(tmp_path / "run", lives=[1])
    others = (replace(SOURCES[0], share=0.5), replace(SOURCES[1], share=0.5))
    with pytest.raises(LedgerRefused, match="sources"):
        await ReplayStore.open(tmp_path / "run", CONFIG, tasks(), run_id="run", seed=3, sources=others)


def test_folding_the_records_gives_the_same_core() -> None:
    buffer, version = core(), FIRST
    for _ in range(5):
        finish(buffer, buffer.issue(100, version, 0.0), version)
        _, version = cases.step(buffer, version)
    again = ReplayBuffer(CONFIG, TaskStream(tasks(), seed=3), Snapshot(records=buffer.drain()), sources=SOURCES)
    assert cases.tables(again) == cases.tables(buffer)
    assert again.state.given() == buffer.state.given() == {"a": 24, "b": 16}
    assert [order.task_id for order in again.issue(9, version, 5.0)] == [
        order.task_id for order in buffer.issue(9, version, 5.0)
    ]
