"""Where archive, checkpoints and trajectory files do not fit together: what a return needs is kept or missed."""

from __future__ import annotations

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from headrace.buffer.audit.evidence import streamed
from headrace.buffer.audit.resume_report import resume_report
from headrace.buffer.audit.verify import lost_rollouts, verify
from headrace.buffer.errors import LedgerMismatch, LedgerRefused
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    publish,
    read_checkpoint,
    set_aside,
    stage,
    write_manifest,
)
from support import replay_cases as cases


async def open_store(run_dir, config=cases.SMALL):
    """With a trajectory file for each write."""
    return await ReplayStore.open(
        run_dir, config, cases.tasks(), run_id="run", seed=3, clock=lambda: 100.0, trajectory_file_bytes=1
    )


async def train(store, version, steps):
    """The batches of these steps, and the version after them."""
    batches = []
    for _ in range(steps):
        while (batch := await store.take(version, version.epoch, timeout_s=0.0)) is None:
            orders = await store.issue(1000, version)
            assert orders
            results = [cases.result(order, version, reward=float(n % 2)) for n, order in enumerate(orders)]
            for result in results:
                await store.offer_many([result])
        version = PolicyVersion(version.epoch, version.step + 1)
        await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False))
        batches.append(batch)
    return batches, version


async def save(store, run_dir, version, batches, before=None):
    """A checkpoint directory of these steps after the checkpoint `before`, recorded."""
    stepped = tuple(
        SteppedBatch(
            batch_id=batch.lease.batch_id,
            members=tuple((item.rollout_id, item.attempt) for item in batch.items),
            skipped=False,
        )
        for batch in batches
    )
    staged = stage(run_dir / "checkpoints", version)
    previous = before.chain if before else ""
    chain = store.status().chain
    write_manifest(staged, Manifest(version=version, previous_chain=previous, chain=chain, batches=stepped))
    ref = read_checkpoint(publish(staged, version))
    await store.checkpointed(ref)
    return ref


async def saved(run_dir, steps=3):
    """An open store after so many steps, and the checkpoint that covers them."""
    store = await open_store(run_dir)
    batches, version = await train(store, await store.open_epoch(None), steps)
    return store, await save(store, run_dir, version, batches)


async def test_a_checkpoint_of_the_initial_version_keeps_the_trajectories_of_all_steps(tmp_path):
    """As a drain before the first step leaves it."""
    store = await open_store(tmp_path)
    async with store:
        start = await save(store, tmp_path, await store.open_epoch(None), [])
        batches, version = await train(store, await store.open_epoch(start), 8)
        newer = await save(store, tmp_path, version, batches, start)
        set_aside(Path(newer.path), "damaged")
        version = await store.open_epoch(start)
        assert verify(tmp_path).problems == ()
        again, _ = await train(store, version, 8)
        assert [batch.lease.batch_id for batch in again] == [batch.lease.batch_id for batch in batches]


async def test_lost_trajectories_under_a_damaged_checkpoint_are_reported_before_the_resume(tmp_path):
    store, kept = await saved(tmp_path)
    async with store:
        batches, version = await train(store, PolicyVersion(1, 3), 3)
        damaged = await save(store, tmp_path, version, batches, kept)
    assert verify(tmp_path).lost == 0
    with closing(sqlite3.connect(tmp_path / "archive.db")) as archive:
        query = "SELECT trajectory_file FROM attempts WHERE rollout_id = ?"
        [(number,)] = archive.execute(query, (batches[-1].items[0].rollout_id,))
    (tmp_path / "trajectories" / f"{number:06d}.db").unlink()
    assert verify(tmp_path).lost == 0, "the newest checkpoint covers them"
    set_aside(Path(damaged.path), "damaged")
    report = resume_report(tmp_path, max_staleness=2)
    assert (report.checkpoint, report.lost > 0) == (str(kept.version), True)
    async with await open_store(tmp_path) as store:
        with streamed(tmp_path) as evidence:
            lost = lost_rollouts(evidence)
        again = await store.operators.retry_lost(lost, kept)
        assert set(again) == set(lost) >= {batches[-1].items[0].rollout_id}
        await store.keep_in_flight(())
        await train(store, await store.open_epoch(kept), 4)
        assert verify(tmp_path).problems == ()


async def test_a_reopened_group_that_an_older_checkpoint_covers_is_not_lost(tmp_path):
    """The second group is trained in both steps; the file of its first member goes with the second checkpoint."""
    store = await open_store(tmp_path, cases.SMALL.model_copy(update={"batch_size": 3}))
    async with store:
        batches, version = await train(store, await store.open_epoch(None), 1)
        first = await save(store, tmp_path, version, batches)
        batches, version = await train(store, version, 1)
        second = await save(store, tmp_path, version, batches, first)
        assert not (tmp_path / "trajectories" / "000003.db").exists()
        set_aside(Path(second.path), "damaged")
        version = await store.open_epoch(first)
        assert verify(tmp_path).problems == ()
        assert resume_report(tmp_path, max_staleness=2).lost == 0
        assert await store.take(version, version.epoch, timeout_s=0.0)


async def test_no_new_ledger_is_created_beside_an_archive(tmp_path):
    store, _ = await saved(tmp_path)
    await store.aclose()

    def groups():
        with closing(sqlite3.connect(tmp_path / "archive.db")) as archive:
            return archive.execute("SELECT count(*) FROM groups").fetchone()

    before = groups()
    for path in tmp_path.glob("ledger.db*"):
        path.unlink()
    with pytest.raises(LedgerRefused, match=r"ledger\.db is missing or empty, but there is .*archive\.db"):
        await open_store(tmp_path)
    assert groups() == before != (0,)
    shutil.copy(tmp_path / "checkpoints" / "1.3" / "ledger.db", tmp_path)
    await (await open_store(tmp_path)).aclose()
    assert verify(tmp_path).problems == ()


async def test_an_archive_that_cannot_be_read_is_refused_in_one_line_and_leaves_no_lock(tmp_path):
    store, _ = await saved(tmp_path)
    await store.aclose()
    archive = tmp_path / "archive.db"
    whole = archive.read_bytes()
    archive.write_bytes(b"x" * len(whole))
    with pytest.raises(LedgerRefused, match=r"archive\.db is not the archive of the ledger beside it"):
        await open_store(tmp_path)
    archive.write_bytes(whole)
    await (await open_store(tmp_path)).aclose()


@pytest.mark.parametrize(("steps", "begun_anew"), [(1, False), (3, False), (3, True)])
async def test_steps_whose_rollouts_were_lost_with_the_archive_are_not_undone(tmp_path, steps, begun_anew):
    store, ref = await saved(tmp_path, steps)
    await store.aclose()
    for path in tmp_path.glob("archive.db*"):
        path.unlink()
    async with await open_store(tmp_path) as store:
        if begun_anew:
            batches, version = await train(store, await store.open_epoch(ref), 3)
            await save(store, tmp_path, version, batches, ref)
        before = store.status()
        with pytest.raises(LedgerMismatch, match=r"archive\.db, which is missing or was replaced"):
            await store.open_epoch(None, from_start=True)
        assert store.status() == before
