"""The ledger on disk: what is written is what is loaded; what is not ours is refused."""

from __future__ import annotations

import os
import pickle
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.actors.run.exit_codes import EXIT_TRANSIENT, exit_code_of_run
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.core.records import AttemptRecord
from headrace.buffer.errors import CodecError, LedgerBroken, LedgerDiskFull, LedgerInUse, LedgerRefused
from headrace.buffer.ledger.ledger import Ledger, StoredTrajectory, unreadable
from headrace.buffer.ledger.local_disk import filesystem_magic, refuse_full, refuse_network
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.codec import decode, encode
from headrace.buffer.trajectories.types import Cause, RolloutId, Trajectory
from headrace.buffer.trajectories.versions import PolicyVersion
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)
IDENTITY = {"run_id": "run", "tasks_sha256": "00"}


def busy_core():
    """A core with something in every table and most states."""
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    cases.fill(buffer, FIRST)
    _, version = cases.step(buffer, FIRST)
    saved = cases.checkpoint(buffer, version)
    buffer.epochs.checkpointed(saved, 4.0)
    orders = buffer.issue(4, version, 5.0)
    buffer.offer(cases.ended(orders[0], Cause.INFRA), 6.0)
    buffer.offer(cases.result(orders[1], version, FIRST), 6.0)
    buffer.offer(cases.result(orders[1], version), 6.0)
    buffer.record_evaluation(cases.result(orders[2], version), orders[2].task_id, "held out", version, 7.0)
    _, version = cases.step(buffer, version, skipped=True)
    assert buffer.take(buffer.open_epoch(saved, 8.0), 2, 9.0) is not None
    return buffer


async def open_store(run_dir):
    return await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="run", seed=3)


def test_load_returns_the_written_records(tmp_path):
    buffer = busy_core()
    ledger = Ledger.open(tmp_path, IDENTITY)
    ledger.write(buffer.drain(), [])
    ledger.close()
    again = Ledger.open(tmp_path, IDENTITY)
    assert cases.tables(cases.core(snapshot=again.load())) == cases.tables(buffer)
    again.close()


def test_the_memory_ledger_behaves_like_the_file_ledger():
    buffer = busy_core()
    ledger = Ledger.in_memory(IDENTITY)
    ledger.write(buffer.drain(), [])
    assert cases.tables(cases.core(snapshot=ledger.load())) == cases.tables(buffer)
    ledger.close()


def stored(buffer, count=3):
    orders = buffer.issue(count, FIRST, 0.0)
    pairs = []
    for seed, order in enumerate(orders):
        done = replace(cases.result(order, FIRST), trajectory=cases.trajectory(FIRST, tokens=50, seed=seed))
        buffer.offer(done, 1.0)
        pairs.append(StoredTrajectory(rollout_id=order.rollout_id, attempt=1, trajectory=done.trajectory))
    return pairs


def assert_equal(left: Trajectory, right: Trajectory):
    assert (left.temperature, len(left.rows)) == (right.temperature, len(right.rows))
    for one, other in zip(left.rows, right.rows, strict=True):
        assert one.versions == other.versions
        for name in ("tokens_T", "loss_mask_T", "logprobs_T"):
            assert getattr(one, name).dtype == getattr(other, name).dtype
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_trajectory_files_rotate_and_stay_readable(tmp_path):
    buffer = cases.core()
    buffer.open_epoch(None, 0.0)
    ledger = Ledger.open(tmp_path, IDENTITY, trajectory_file_bytes=1)
    pairs = stored(buffer)
    for pair in pairs:
        ledger.write(buffer.drain(), [pair])
    names = sorted(path.name for path in (tmp_path / "trajectories").glob("*.db"))
    assert names == [f"00000{number}.db" for number in range(1, 5)], "each write finds its file full"
    ledger.close()
    again = Ledger.open(tmp_path, IDENTITY)
    loaded = again.trajectories([(pair.rollout_id, pair.attempt) for pair in pairs])
    for pair, trajectory in zip(pairs, loaded, strict=True):
        assert_equal(pair.trajectory, trajectory)
    with pytest.raises(LedgerBroken, match="missing"):
        again.trajectories([(RolloutId("g000007-1"), 1)])
    again.close()


def test_a_failed_write_leaves_no_rows(tmp_path):
    buffer = busy_core()
    ledger = Ledger.open(tmp_path, IDENTITY)
    ledger.write(buffer.drain(), [])
    before = ledger.load()
    orphan = AttemptRecord(rollout_id=RolloutId("g999-0"), attempt=1, version=FIRST, issued_at_s=0.0)
    buffer.state.count("something")
    with pytest.raises(sqlite3.IntegrityError):
        ledger.write([*buffer.drain(), orphan], [])
    assert ledger.load() == before
    ledger.close()


def test_the_ledger_cannot_be_opened_by_a_second_process(tmp_path):
    ledger = Ledger.open(tmp_path, IDENTITY)
    with pytest.raises(LedgerInUse, match="another process"):
        Ledger.open(tmp_path, IDENTITY)
    ledger.close()
    ledger.close()
    Ledger.open(tmp_path, IDENTITY).close()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("PRAGMA user_version = 99", "unreleased version"),
        ("PRAGMA application_id = 7", "another program: start a new run"),
        ("UPDATE meta SET value = 'other' WHERE key = 'run_id'", "run_id = other"),
        ("UPDATE meta SET value = 'other' WHERE key = 'tasks_sha256'", "tasks_sha256"),
    ],
)
def test_foreign_ledgers_are_refused_and_unchanged(tmp_path, damage, message):
    Ledger.open(tmp_path, IDENTITY).close()
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute(damage)
    database.close()
    before = (tmp_path / "ledger.db").read_bytes()
    with pytest.raises(LedgerRefused, match=message):
        Ledger.open(tmp_path, IDENTITY)
    assert (tmp_path / "ledger.db").read_bytes() == before


def test_garbage_is_refused_and_an_empty_file_becomes_a_new_ledger(tmp_path):
    path = tmp_path / "ledger.db"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(LedgerRefused, match="not readable"):
        Ledger.open(tmp_path, IDENTITY)
    path.write_bytes(b"")
    Ledger.open(tmp_path, IDENTITY).close()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_error_for_a_truncated_ledger_names_the_fix(tmp_path, share):
    ledger = Ledger.open(tmp_path, IDENTITY)
    ledger.write(busy_core().drain(), [])
    ledger.close()
    path = tmp_path / "ledger.db"
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(LedgerRefused, match=r"not readable.*newest copy.*newest directory") as refused:
        Ledger.open(tmp_path, IDENTITY)
    assert "\n" not in str(refused.value)
    with pytest.raises(LedgerRefused, match="not readable"):
        read_evidence(tmp_path)


async def test_a_truncated_ledger_with_a_log_is_refused_and_its_copy_opens(tmp_path):
    """With a log the first pages may be whole: the damage shows only where rows are read."""
    killed = tmp_path / "killed"
    async with await open_store(tmp_path / "run") as store:
        version = await store.open_epoch(None)
        await store.issue(8, version)
        await store.export(tmp_path / "checkpoint")
    async with await open_store(tmp_path / "run") as store:
        await store.open_epoch(None)
        shutil.copytree(tmp_path / "run", killed)
    os.truncate(killed / "ledger.db", (killed / "ledger.db").stat().st_size // 2)
    with pytest.raises(LedgerRefused, match="newest copy"):
        read_evidence(killed)
    with pytest.raises(LedgerRefused, match="newest copy"):
        await open_store(killed)
    for path in killed.glob("ledger.db*"):
        path.unlink()
    shutil.copy(tmp_path / "checkpoint" / "ledger.db", killed)
    async with await open_store(killed) as store:
        assert await store.open_epoch(None) == PolicyVersion(2, 0)


def test_a_full_disk_is_not_reported_as_damage():
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError, match="full") as full:
        database.execute("CREATE TABLE held (row BLOB)")
    error = unreadable(Path("ledger.db"), full.value)
    assert str(error) == "ledger.db cannot be opened: database or disk is full: free some space, then resume the run"
    assert exit_code_of_run(error) == EXIT_TRANSIENT


def test_network_file_systems_are_refused(tmp_path):
    refuse_network(tmp_path, filesystem_magic(tmp_path))
    with pytest.raises(LedgerRefused, match="NFS"):
        refuse_network(tmp_path, 0x6969)
    with pytest.raises(LedgerRefused, match="CIFS"):
        refuse_network(tmp_path, 0xFF534D42)
    with pytest.raises(OSError, match="No such file"):
        filesystem_magic(tmp_path / "missing")
    if os.path.ismount("/proc"):
        assert filesystem_magic(Path("/proc")) == 0x9FA0, "procfs, from statfs(2)"


def test_a_full_disk_is_refused_before_a_write_fails_halfway(tmp_path):
    refuse_full(tmp_path, 1 << 30)
    with pytest.raises(LedgerDiskFull, match="free some space"):
        refuse_full(tmp_path, 1 << 20)


def test_a_backup_is_a_complete_ledger(tmp_path):
    buffer = busy_core()
    ledger = Ledger.open(tmp_path / "run", IDENTITY)
    ledger.write(buffer.drain(), [])
    copy = tmp_path / "copy"
    copy.mkdir()
    ledger.backup(copy / "ledger.db")
    assert [path.name for path in copy.iterdir()] == ["ledger.db"]
    restored = Ledger.open(copy, IDENTITY)
    assert restored.load() == ledger.load()
    restored.close()
    ledger.close()


def test_the_trajectory_codec_round_trips_exactly_and_stably():
    first = cases.trajectory(FIRST, PolicyVersion(2, 7), tokens=9)
    empty = replace(
        first.rows[0],
        versions=(),
        **{name: getattr(first.rows[0], name)[:0] for name in ("tokens_T", "loss_mask_T", "logprobs_T")},
    )
    stale = replace(first.rows[0], versions=tuple(replace(span, stale_kv=True) for span in first.rows[0].versions))
    for trajectory in (
        first,
        replace(first, rows=(*first.rows, empty), temperature=0.7),
        replace(first, rows=(stale, *first.rows)),
        replace(first, rows=()),
    ):
        data = encode(trajectory)
        assert_equal(decode(data), trajectory)
        assert_equal(pickle.loads(pickle.dumps(trajectory)), trajectory)
        assert encode(trajectory) == data


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[:-3], lambda data: b"x" + data, lambda data: data[:9] + b"\0\0\0" + data[12:]],
)
def test_damaged_trajectories_are_refused(damage):
    data = encode(cases.trajectory(FIRST, tokens=40))
    with pytest.raises(CodecError):
        decode(damage(data))


def test_every_flipped_bit_in_a_stored_trajectory_is_detected():
    stored = cases.trajectory(FIRST, tokens=12)
    data = encode(stored)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            read = decode(bytes(damaged))
        except CodecError:
            continue
        # A bit that the frame format does not use.
        assert encode(read) == data
