"""The sequence of ends: one order of training and evaluation, whatever the clock, the archive and a return do."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from golden import make_ledger as making
from headrace.actors.rollouts.evaluation_folders import evaluation_order
from headrace.buffer.audit.evidence import rows_of
from headrace.buffer.audit.joined_rows import Attempt
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import Cause, CheckpointRef
from support import replay_cases as cases


def ends_of(run_dir: Path, after: int = 0) -> list[Attempt]:
    with rows_of(run_dir) as rows:
        return list(rows.ends(after))


def names_of(ends: list[Attempt]) -> list[str]:
    return [end.rollout_id for end in ends]


def numbers_in(path: Path) -> dict[str, int]:
    """Return the numbers of the ended attempts of one file, by rollout; each has one attempt."""
    with closing(sqlite3.connect(path)) as database:
        query = "SELECT rollout_id, end_sequence FROM attempts WHERE ended_at_s NOTNULL"
        return dict(database.execute(query).fetchall())


async def opened(run_dir: Path, clock: list[float]) -> ReplayStore:
    return await ReplayStore.open(run_dir, making.CONFIG, cases.tasks(), run_id="r", seed=3, clock=lambda: clock[0])


async def test_ends_are_in_order_though_the_clock_was_set_back(tmp_path: Path) -> None:
    clock = [1_800_000_000.0]
    async with await opened(tmp_path, clock) as store:
        version = await store.open_epoch(None)
        first, second, third, fourth = await store.issue(4, version)
        graded = evaluation_order("t", first.task_id, 0)
        await store.offer_many([cases.ended(first, Cause.INFRA)])
        seen = ends_of(tmp_path)[-1].sequence
        clock[0] -= 3600.0
        await store.offer_many([cases.ended(third, Cause.INFRA), cases.ended(second, Cause.INFRA)])
        await store.evaluations.record([(cases.result(graded, version), graded.task_id)], tag="t", version=version)
        clock[0] += 7200.0
        await store.offer_many([cases.ended(fourth, Cause.INFRA)])
    ends = ends_of(tmp_path)
    order = [each.rollout_id for each in (first, third, second, graded, fourth)]
    assert names_of(ends) == order
    assert [end.purpose for end in ends] == ["train", "train", "train", "evaluation", "train"]
    assert len({end.sequence for end in ends}) == 5
    assert names_of(ends_of(tmp_path, seen)) == order[1:]
    assert ends_of(tmp_path, ends[-1].sequence) == []


async def test_an_end_keeps_its_number_in_the_archive_and_when_it_comes_back(tmp_path: Path) -> None:
    clock = [1_800_000_000.0]
    async with await opened(tmp_path, clock) as store:
        version = await store.open_epoch(None)
        first, version = await making.step(store, version)
        clock[0] -= 3600.0
        second, version = await making.step(store, version)
        before = ends_of(tmp_path)
        folder = tmp_path / "checkpoints" / str(version)
        folder.mkdir(parents=True)
        batches = (first.batch_id, second.batch_id)
        await store.checkpointed(
            CheckpointRef(path=str(folder), version=version, batch_ids=batches, chain=store.status().chain)
        )
        archived = numbers_in(tmp_path / "archive.db")
        assert archived
        assert not archived.keys() & numbers_in(tmp_path / "ledger.db").keys(), "they have left the ledger"
        assert ends_of(tmp_path) == before
        version = await store.open_epoch(None, from_start=True)
        assert archived.items() <= numbers_in(tmp_path / "ledger.db").items(), "they came back"
        assert ends_of(tmp_path) == before
        order = evaluation_order("t", cases.tasks()[0].id, 0)
        await store.evaluations.record([(cases.result(order, version), order.task_id)], tag="t", version=version)
    assert names_of(ends_of(tmp_path, before[-1].sequence)) == [order.rollout_id]


async def test_a_ledger_that_was_restored_from_a_copy_gives_no_number_again(tmp_path: Path) -> None:
    clock = [1_800_000_000.0]
    async with await opened(tmp_path, clock) as store:
        version = await store.open_epoch(None)
        orders = await store.issue(4, version)
        await store.export(tmp_path / "copy")
        clock[0] += 10.0
        await store.offer_many([cases.ended(order, Cause.INFRA) for order in orders])
    seen = ends_of(tmp_path)
    assert len(seen) == 4
    shutil.copy(tmp_path / "copy" / "ledger.db", tmp_path / "ledger.db")
    assert ends_of(tmp_path) == []
    clock[0] += 10.0
    async with await opened(tmp_path, clock) as store:
        await store.offer_many([cases.ended(orders[0], Cause.INFRA)])
    assert names_of(ends_of(tmp_path, seen[-1].sequence)) == [orders[0].rollout_id]
