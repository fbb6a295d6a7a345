"""Copies of a running ledger in storage, and ledgers that are restored from them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.storage.ledger_copies import OUTCOME, LedgerCopies, read_outcome
from headrace.actors.record.storage.restore import restore_run
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.records import RolloutState
from headrace.buffer.core.replay import CopyOutcome
from headrace.buffer.errors import LedgerRefused
from headrace.buffer.ledger.copies import (
    EPOCH_GAP,
    copied_versions,
    read_copy,
    restore,
    write_copy,
)
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import CheckpointRef, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoint_retention import remove_old
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    publish,
    read_checkpoint,
    stage,
    write_manifest,
)
from support import replay_cases as cases
from support.ledger_copies import newest_copy

GUARD_S = 60
CONFIG = BufferConfig.model_validate(cases.SMALL.model_dump())


class Life:
    """A run with its ledger in `state` and its checkpoints in `storage`."""

    def __init__(self, folder: Path) -> None:
        self.state, self.storage = folder / "state", folder / "storage"
        self.storage.mkdir(parents=True)
        self.version = PolicyVersion(1, 0)
        self.unsaved: list[SteppedBatch] = []
        self.previous = ""

    async def open(self, **settings: int) -> ReplayStore:
        self.store = await ReplayStore.open(self.state, CONFIG, cases.tasks(), run_id="run", seed=3, **settings)
        return self.store

    async def begin(self, checkpoint: CheckpointRef | None) -> None:
        self.version = await self.store.open_epoch(checkpoint)
        self.previous, self.unsaved = checkpoint.chain if checkpoint else "", []

    async def step(self) -> None:
        orders = await self.store.issue(1000, self.version)
        await self.store.offer_many(
            [cases.result(order, self.version, reward=float(place % 2)) for place, order in enumerate(orders)]
        )
        batch = await self.store.take(self.version, self.version.epoch, timeout_s=1.0)
        assert batch is not None
        self.version = PolicyVersion(self.version.epoch, self.version.step + 1)
        report = StepReport(batch_id=batch.lease.batch_id, version=self.version, skipped=False)
        await self.store.commit(batch.lease, report)
        members = tuple((item.rollout_id, item.attempt) for item in batch.items)
        self.unsaved.append(SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=False))

    async def save(self, *, copied: bool = True) -> CheckpointRef:
        staged = stage(self.storage / "checkpoints", self.version)
        chain = self.store.status().chain
        batches = tuple(self.unsaved)
        write_manifest(
            staged, Manifest(version=self.version, previous_chain=self.previous, chain=chain, batches=batches)
        )
        self.previous, self.unsaved = chain, []
        ref = read_checkpoint(publish(staged, self.version))
        await self.store.checkpointed(ref, copied_elsewhere=True)
        if copied:
            self.copy()
        return ref

    def copy(self) -> None:
        write_copy(self.state, self.storage, self.version, taken_at_s=100.0)

    async def lose(self) -> None:
        """Lose the disk of the ledger."""
        await self.store.aclose()
        shutil.rmtree(self.state)


@pytest.fixture
async def life(tmp_path: Path) -> Life:
    return Life(tmp_path)


async def trained_on(life: Life, steps: int) -> None:
    """Resume as a learner does, train, save, and check the ledger."""
    newest = read_checkpoint(max((life.storage / "checkpoints").glob("[0-9]*"), key=lambda path: path.stat().st_mtime))
    async with await life.open() as store:
        await life.begin(newest)
        await store.keep_in_flight(())
        for _ in range(steps):
            await life.step()
        await life.save(copied=False)
    report = verify(life.state)
    assert report.clean, report.problems
    assert (report.trained_twice, report.lost) == (0, 0)


async def test_a_restored_run_has_its_untrained_rollouts_and_issues_those_in_flight_again(life: Life) -> None:
    async with await life.open() as store:
        await life.begin(None)
        for _ in range(3):
            await life.step()
        await life.save(copied=False)
        # Steps after the checkpoint, rollouts that wait, are sealed, leased or in flight: all before the copy.
        await life.step()
        in_flight = await store.issue(2, life.version)
        waiting = await store.issue(2, life.version)
        await store.offer_many([cases.result(waiting[0], life.version)])
        await store.take(life.version, 1, timeout_s=1.0)
        status = store.status()
        write_copy(life.state, life.storage, PolicyVersion(1, 3), taken_at_s=100.0)
        await store.offer_many([cases.result(order, life.version) for order in in_flight])
    await life.lose()
    report = restore_run(life.state, life.storage)
    assert (report.version, report.steps_lost, report.issued_again) == (
        "1.3",
        0,
        status.rollouts[RolloutState.IN_FLIGHT],
    )
    copy = newest_copy(life.storage)
    assert copy is not None
    kept = sum(status.rollouts.get(state, 0) for state in (RolloutState.WAITING, RolloutState.SEALED))
    leased_or_undone = 2 * CONFIG.batch_size
    assert report.untrained == copy.untrained == kept + leased_or_undone
    async with await life.open() as store:
        again = store.status()
        assert again.rollouts == status.rollouts
        assert again.chain == status.chain
    await trained_on(life, steps=4)


async def test_trajectories_that_are_trained_are_not_copied(life: Life) -> None:
    async with await life.open():
        await life.begin(None)
        for _ in range(6):
            await life.step()
        await life.save()
        copy = newest_copy(life.storage)
        assert copy is not None
        stored = sum(life.store.status().rollouts[state] for state in (RolloutState.SEALED, RolloutState.TRAINED))
        assert copy.untrained == life.store.status().rollouts[RolloutState.SEALED] < stored


async def test_checkpoints_newer_than_the_copy_are_set_aside_and_counted(life: Life) -> None:
    async with await life.open():
        await life.begin(None)
        for number in range(1, 7):
            await life.step()
            if number % 2 == 0:
                await life.save(copied=number == 2)
    (life.storage / "weights" / "1.8").mkdir(parents=True)
    await life.lose()
    report = restore_run(life.state, life.storage)
    assert (report.version, report.newest, report.steps_lost) == ("1.2", "1.8", 6)
    assert sorted(report.set_aside) == ["1.4", "1.6"]
    assert sorted(path.name for path in (life.storage / "checkpoints").iterdir()) == ["1.2", "aside-1.4", "aside-1.6"]
    assert RunDirectory(path=life.state).run_id() == "run"
    assert any("lost 6 steps" in line for line in report.lines())
    await trained_on(life, steps=3)
    assert life.version.epoch == 1 + EPOCH_GAP + 1, "an epoch that the lost ledger may have opened is not opened again"


async def test_epochs_stay_apart_when_the_restored_ledger_is_lost_too(life: Life) -> None:
    async with await life.open():
        await life.begin(None)
        await life.step()
        await life.save()
    opened = set()
    for _ in range(3):
        await life.lose()
        report = restore_run(life.state, life.storage)
        assert report.version == "1.1"
        async with await life.open():
            await life.begin(read_checkpoint(life.storage / "checkpoints" / "1.1"))
            opened.add(life.version.epoch)
    assert opened == {102, 202, 302}


@pytest.mark.parametrize("damage", ["manifest", "ledger", "trajectories", "checkpoint"])
async def test_a_damaged_copy_or_checkpoint_is_left_out_for_the_one_before(life: Life, damage: str) -> None:
    async with await life.open():
        await life.begin(None)
        for _ in range(2):
            await life.step()
            await life.save()
    await life.lose()
    copy = life.storage / "ledger" / "1.2"
    file = {
        "manifest": copy / "copy.json",
        "ledger": copy / "ledger.db",
        "trajectories": next((copy / "trajectories").iterdir()),
        "checkpoint": life.storage / "checkpoints" / "1.2" / "headrace.json",
    }[damage]
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    report = restore_run(life.state, life.storage)
    assert report.version == "1.1"
    assert list(report.left_out) == ["1.2"]
    assert str(file.parent if damage in ("manifest", "checkpoint") else file) in report.left_out["1.2"]
    await trained_on(life, steps=2)


async def test_a_restoration_is_refused_over_a_ledger_and_without_a_copy(life: Life) -> None:
    with pytest.raises(LedgerRefused, match="contains no usable copy of the ledger: start a new run"):
        (life.storage / "ledger").mkdir()
        restore_run(life.state, life.storage)
    shutil.rmtree(life.state)
    async with await life.open():
        await life.begin(None)
        await life.step()
        await life.save()
    with pytest.raises(LedgerRefused, match=r"state/ledger\.db exists: resume the run from this folder"):
        restore_run(life.state, life.storage)
    assert verify(life.state).issued > 0
    with pytest.raises(LedgerRefused, match="does not exist: mount the storage"):
        restore_run(life.state, life.storage / "absent")


async def test_a_lost_ledger_is_named_with_the_folder_of_its_copies(life: Life) -> None:
    async with await life.open():
        await life.begin(None)
        await life.step()
        await life.save()
    await life.lose()
    restore_run(life.state, life.storage)
    (life.state / "ledger.db").unlink()
    with pytest.raises(LedgerRefused, match=r"it is in .*storage/ledger; restore it to an empty folder with `headrace"):
        verify(life.state)


async def test_an_interrupted_restoration_can_be_repeated(life: Life) -> None:
    async with await life.open():
        await life.begin(None)
        await life.step()
        await life.save()
    await life.lose()
    copy = newest_copy(life.storage)
    assert copy is not None
    (life.state / "restoring" / "trajectories").mkdir(parents=True)
    (life.state / "trajectories").mkdir()
    (life.state / "archive.db").write_bytes(b"half")
    restore(copy, life.state, epochs_reserved=7)
    async with await life.open() as store:
        assert store.status().chain


async def test_only_the_newest_copies_are_kept_and_their_checkpoints_too(life: Life) -> None:
    async with await life.open():
        await life.begin(None)
        for number in range(1, 7):
            await life.step()
            await life.save(copied=number < 4)
            remove_old(life.storage / "checkpoints", newest=2)
    assert copied_versions(life.storage) == [PolicyVersion(1, 2), PolicyVersion(1, 3)]
    names = sorted(path.name for path in (life.storage / "checkpoints").glob("1.*"))
    assert names == ["1.2", "1.3", "1.5", "1.6"]


async def test_a_failed_copy_leaves_the_copies_before_it(life: Life) -> None:
    async with await life.open():
        await life.begin(None)
        await life.step()
        await life.save()
        shutil.rmtree(life.state / "trajectories")
        (life.state / "trajectories").mkdir()
        with pytest.raises(OSError, match="cannot be copied"):
            write_copy(life.state, life.storage, PolicyVersion(1, 1), taken_at_s=200.0)
        assert [path.name for path in (life.storage / "ledger").iterdir()] == ["1.1"]
        assert read_copy(life.storage / "ledger" / "1.1").taken_at_s == 100.0
        assert not (life.state / "copying").exists()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(path=tmp_path / "state")
    directory.write_beginning(cases.tasks(), "run")
    return directory


async def saved(replay: Replay, root: Path, version: PolicyVersion) -> None:
    """Train a step and record its checkpoint."""
    await replay.reconcile([], "feeder")
    orders = (await replay.issue(8, "feeder", timeout_s=0.0)).orders
    await replay.offer([cases.result(order, version, reward=float(place % 2)) for place, order in enumerate(orders)])
    batch = await replay.take(version, timeout_s=GUARD_S)
    assert batch is not None
    after = PolicyVersion(version.epoch, version.step + 1)
    await replay.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=after, skipped=False))
    chain = (await replay.status()).chain
    path = root / "checkpoints" / str(after)
    await replay.checkpointed(
        CheckpointRef(path=str(path), version=after, batch_ids=(batch.lease.batch_id,), chain=chain)
    )


async def outcome(replay: Replay, version: PolicyVersion) -> CopyOutcome:
    """Wait for the outcome of the copy for `version`."""
    async with asyncio.timeout(GUARD_S):
        while True:
            copied = (await replay.status()).ledger_copy
            assert copied is not None
            if str(version) in (copied.version, copied.failed):
                return copied
            await asyncio.sleep(0.005)


async def test_the_buffer_copies_its_ledger_with_each_checkpoint_and_reports_it(
    directory: RunDirectory, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    async with (
        asyncio.timeout(GUARD_S),
        Replay(CONFIG, directory=directory, seed=3, copies=storage, clock=lambda: 500.0) as replay,
    ):
        await replay.open_epoch(None)
        await saved(replay, storage, PolicyVersion(1, 0))
        assert await outcome(replay, PolicyVersion(1, 1)) == CopyOutcome(version="1.1", at_s=500.0)
        # Storage is away: the run goes on, and the failure is known without a process.
        away = tmp_path / "away"
        storage.rename(away)
        await saved(replay, storage, PolicyVersion(1, 1))
        failed = await outcome(replay, PolicyVersion(1, 2))
        assert (failed.version, failed.failed, failed.failed_at_s) == ("1.1", "1.2", 500.0)
        assert "No such file or directory" in failed.error
        assert read_outcome(directory.path) == failed
        assert not storage.exists(), "storage that is absent is not created on a local disk"
        away.rename(storage)
        await saved(replay, storage, PolicyVersion(1, 2))
        assert (await outcome(replay, PolicyVersion(1, 3))).error == ""
    assert json.loads((directory.path / OUTCOME).read_bytes())["version"] == "1.3"


async def test_the_last_checkpoint_is_copied_before_the_buffer_closes(directory: RunDirectory, tmp_path: Path) -> None:
    storage = tmp_path / "storage"
    storage.mkdir()
    async with asyncio.timeout(GUARD_S), Replay(CONFIG, directory=directory, seed=3, copies=storage) as replay:
        await replay.open_epoch(None)
        await saved(replay, storage, PolicyVersion(1, 0))
        await saved(replay, storage, PolicyVersion(1, 1))
    copy = newest_copy(storage)
    assert copy is not None
    assert copy.version == PolicyVersion(1, 2)


async def test_trajectories_that_no_checkpoint_in_storage_needs_are_deleted(life: Life) -> None:
    def files() -> set[str]:
        return {path.name for path in (life.state / "trajectories").glob("*.db")}

    async with (
        asyncio.timeout(GUARD_S),
        await life.open(trajectory_file_bytes=1) as store,
        LedgerCopies(store, life.state, life.storage, lambda: 9.0) as copies,
    ):
        await life.begin(None)
        for _ in range(4):
            await life.step()
            copies.request(await life.save(copied=False))
            await copies.idle()
        before = files()
        shutil.rmtree(life.storage / "checkpoints" / "1.1")
        shutil.rmtree(life.storage / "checkpoints" / "1.2")
        shutil.rmtree(life.storage / "checkpoints" / "1.3")
        await life.step()
        copies.request(await life.save(copied=False))
        await copies.idle()
        assert before - files()
    report = verify(life.state)
    # The directories of this test are not beside the ledger.
    assert (report.lost, report.trained_twice) == (0, 0)


async def test_storage_that_hangs_delays_no_step_and_the_newest_checkpoint_is_copied_afterwards(life: Life) -> None:
    async with (
        asyncio.timeout(GUARD_S),
        await life.open() as store,
        LedgerCopies(store, life.state, life.storage, lambda: 9.0, hung_s=0.05) as copies,
    ):
        await life.begin(None)
        await life.step()
        # Opening it for reading blocks until somebody opens it for writing.
        file = life.state / "trajectories" / "000001.db"
        kept = file.rename(file.with_suffix(".kept"))
        os.mkfifo(file)
        try:
            copies.request(await life.save(copied=False))
            for _ in range(3):
                await life.step()
                copies.request(await life.save(copied=False))
            while not copies.outcome.error:  # noqa: ASYNC110 - as `headrace status` asks
                await asyncio.sleep(0.005)
            assert copies.outcome.failed == "1.1"
            assert "has not answered for 0 s" in copies.outcome.error
        finally:
            released = os.open(file, os.O_RDWR | os.O_NONBLOCK)
            kept.replace(file)
            os.close(released)
        await copies.idle()
        assert copies.outcome.version == "1.4"


async def test_nobody_waits_for_copies_of_a_ledger_that_is_broken(life: Life) -> None:
    store = await life.open()
    async with asyncio.timeout(GUARD_S), LedgerCopies(store, life.state, life.storage, lambda: 9.0) as copies:
        async with store:
            await life.begin(None)
            await life.step()
            checkpoint = await life.save(copied=False)
        for _ in range(2):
            copies.request(checkpoint)
            await copies.idle()
