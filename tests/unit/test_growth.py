"""A run of months costs no more to go on with than one of hours: nothing but what is open is read."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
from benches.long_runs.months import write_run

from headrace.buffer.audit.evidence import read_evidence, read_open
from headrace.buffer.audit.export import export
from headrace.buffer.audit.resume_report import resume_report
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.records import RolloutState
from headrace.buffer.errors import LedgerMismatch
from headrace.buffer.ledger import ledger as ledger_module
from headrace.buffer.ledger.ledger import Ledger
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import CheckpointRef, GroupId, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import usable_checkpoint
from support import replay_cases as cases

HOURS = 1 / 24


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Of three hours and of nine."""
    folder = tmp_path_factory.mktemp("runs")
    return {name: write_run(folder, name, days=hours * HOURS)[1].path for name, hours in (("short", 3), ("long", 9))}


@pytest.fixture
def run(runs, tmp_path):
    """A copy of one of them, by name."""
    return lambda name: shutil.copytree(runs[name], tmp_path / name)


def opened(run_dir):
    return Ledger.open(run_dir, {"run_id": (run_dir / "run_id").read_text()})


def loaded(run_dir):
    with closing(opened(run_dir)) as ledger:
        return ledger.load()


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize(("name", "steps"), [("short", 43), ("long", 133)])
def test_a_generated_run_is_complete_and_has_no_problems(run, name, steps):
    report = verify(run(name))
    assert report.problems == ()
    assert (report.steps, report.lost, report.trained_twice) == (steps, 0, 0)
    assert report.issued == (steps + 3) * 64
    assert report.max_staleness_seen == 3


def kinds_of(snapshot):
    return sorted(type(record).__name__ for record in snapshot.records if type(record).__name__ != "TaskRecord")


def test_a_ledger_keeps_as_many_rows_after_nine_hours_as_after_three(run):
    short, long = (loaded(run(name)) for name in ("short", "long"))
    assert kinds_of(short) == kinds_of(long)
    assert len(long.evaluations) == len(short.evaluations) == 0
    assert (short.next_commit, long.next_commit) == (44, 134)
    assert long.closed == {RolloutState.TRAINED: 130 * 64}
    assert long.steps_closed == 129


def test_the_resume_report_reads_only_open_groups(run):
    short, long = run("short"), run("long")
    sizes = [
        {name: len(getattr(read_open(path), name)) for name in ("groups", "rollouts", "attempts", "batches", "commits")}
        for path in (short, long)
    ]
    assert sizes[0] == sizes[1]
    report = resume_report(long, max_staleness=4)
    assert (report.steps_kept, report.steps_undone, report.lost, report.problems) == (130, 3, 0, ())
    assert report.kept + report.restarted + report.pending + report.ended == verify(long).issued
    assert sum(decile.kept for decile in report.deciles) == (3 + 3) * 64 - 32, "of open groups"


def test_a_checkpoints_ledger_copy_is_as_large_after_nine_hours_as_after_three(run, tmp_path):
    sizes = []
    for name in ("short", "long"):
        with closing(opened(run(name))) as ledger:
            ledger.backup(tmp_path / f"{name}.db")
        sizes.append((tmp_path / f"{name}.db").stat().st_size)
    assert max(sizes) <= 1.1 * min(sizes)


def test_returning_to_a_checkpoint_recalls_only_the_undone_rows(run):
    run_dir = run("long")
    with closing(sqlite3.connect(run_dir / "archive.db")) as archive:
        [(chain,)] = archive.execute("SELECT chain FROM commits WHERE sequence = 110")
    with closing(opened(run_dir)) as ledger:
        ledger.recall(chain)
        snapshot = ledger.load()
    names = kinds_of(snapshot)
    assert names.count("BatchRecord") == 20 + 3 + 1, "steps 111 to 133, and the leased batch"
    assert names.count("GroupRecord") == 8 * (20 + 3 + 3)
    assert snapshot.closed == {RolloutState.TRAINED: 110 * 64}
    assert snapshot.steps_closed == 109
    assert verify(run_dir).problems == ()


def test_reading_the_ledger_and_the_archive_gives_all_rows(run, tmp_path):
    run_dir = run("long")
    assert len(read_evidence(run_dir).rollouts) == 136 * 64
    with closing(opened(run_dir)) as ledger:
        assert len(ledger.evaluations("step-10")) == 64
        assert set(ledger.ended_evaluations().values()) == {0.5}
    assert export(run_dir, tmp_path / "out").rows["rollouts"] == 136 * 64


def test_a_missing_archive_is_reported_and_does_not_stop_the_run(run):
    run_dir = run("long")
    (run_dir / "archive.db").unlink()
    assert "archive.db is missing: it holds 8320 rollouts of closed groups" in verify(run_dir).problems
    assert loaded(run_dir).closed == {RolloutState.TRAINED: 130 * 64}
    assert resume_report(run_dir, max_staleness=4).lost == 0


def test_a_restored_ledger_accepts_the_newer_archive(run, tmp_path):
    """The archive is newer: what the ledger has not given out does not count, and goes when the run goes on."""
    run_dir = run("long")
    with closing(sqlite3.connect(run_dir / "archive.db")) as archive, archive:
        archive.execute(
            "INSERT INTO groups SELECT 'g999999', 999999, task_id, state, opened_at_s, 999999, ended_at_s, 1, "
            "max_evictions, rule, min_members, advantage, 999999 FROM groups LIMIT 1"
        )
    assert verify(run_dir).problems == ()
    opened(run_dir).close()
    with closing(sqlite3.connect(run_dir / "archive.db")) as archive:
        assert archive.execute("SELECT count(*) FROM groups WHERE ordinal >= 1088").fetchone() == (0,)


async def test_returning_to_a_checkpoint_in_a_lost_archive_is_refused(tmp_path):
    store, ref, _ = await stocked(tmp_path)
    async with store:
        await store.checkpointed(ref)
        version = await store.open_epoch(ref)
        orders = await store.issue(8, version)
        await store.offer_many([cases.result(order, version) for order in orders])
        batch = await store.take(version, 2, timeout_s=0.0)
        after = PolicyVersion(2, 2)
        await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
        chain, ids = store.status().chain, (batch.lease.batch_id,)
        await store.checkpointed(CheckpointRef(path="newer", version=after, batch_ids=ids, chain=chain))
    (tmp_path / "archive.db").unlink()
    async with await ReplayStore.open(tmp_path, cases.SMALL, cases.tasks(), run_id="run", seed=3) as store:
        with pytest.raises(LedgerMismatch, match=r"archive\.db, which is missing"):
            await store.open_epoch(None, from_start=True)
        assert store.status().head == after


async def stocked(run_dir):
    """An open store with a step to be covered by a checkpoint, and orders in flight."""
    store = await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="run", seed=3)
    version = await store.open_epoch(None)
    orders = await store.issue(8, version)
    await store.offer_many([cases.result(order, version) for order in orders[:4]])
    batch = await store.take(version, 1, timeout_s=0.0)
    after = PolicyVersion(1, 1)
    await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
    folder = run_dir / "checkpoints" / "1.1"
    folder.mkdir(parents=True)
    ref = CheckpointRef(path=str(folder), version=after, batch_ids=(batch.lease.batch_id,), chain=store.status().chain)
    return store, ref, orders[4:]


async def test_offers_are_answered_while_a_checkpoints_ledger_copy_is_written(tmp_path, monkeypatch):
    store, ref, orders = await stocked(tmp_path)
    copying, go_on = threading.Event(), threading.Event()

    def slow_fsync(path):
        if path.suffix == ".part":
            copying.set()
            assert go_on.wait(60)

    monkeypatch.setattr(ledger_module, "fsync", slow_fsync)
    async with store:
        saving = asyncio.create_task(store.checkpointed(ref))
        assert await asyncio.to_thread(copying.wait, 60)
        async with asyncio.timeout(30):
            [receipt] = await store.offer_many([cases.result(orders[0], PolicyVersion(1, 0))])
        assert receipt.status == "accepted"
        assert not saving.done()
        go_on.set()
        await saving
    assert (tmp_path / "checkpoints" / "1.1" / "ledger.db").exists()


async def test_a_finished_evaluation_is_known_after_a_restart_and_from_the_archive(tmp_path):
    store, ref, _ = await stocked(tmp_path)
    answer = cases.result(SimpleNamespace(rollout_id="base/task-0/0", attempt=1), PolicyVersion(1, 0))
    async with store:
        await store.evaluations.record([(answer, "task-0")], tag=GroupId("base"), version=PolicyVersion(1, 0))
        assert await store.evaluations.ended() == {}
        await store.evaluations.end("base", 0, {"success": 0.25, "answers": 4})
        await store.checkpointed(ref)
        assert store.status().evaluations == 1
    async with await ReplayStore.open(tmp_path, cases.SMALL, cases.tasks(), run_id="run", seed=3) as store:
        assert await store.evaluations.ended() == {"base": 0.25}
        assert [record.rollout_id for record in await store.evaluations.recorded("base")] == ["base/task-0/0"]
        assert store.status().evaluations == 1


def test_the_newest_checkpoints_step_stays_in_the_ledger(run):
    run_dir = run("long")
    ref = usable_checkpoint(run_dir / "checkpoints").checkpoint
    with closing(opened(run_dir)) as ledger:
        snapshot = ledger.load()
    assert ref.chain in {record.chain for record in snapshot.records if type(record).__name__ == "CommitRecord"}
