"""Trajectory files go, whole, when no checkpoint directory that is left could need them again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.trajectories.types import CheckpointRef, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    publish,
    read_checkpoint,
    stage,
    write_manifest,
)
from support import replay_cases as cases

FIRST = PolicyVersion(1, 0)


class Run:
    """Steps with a checkpoint after each, every trajectory in a file of its own."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.version = run_dir, FIRST
        self.checkpoints: list[CheckpointRef] = []

    async def open(self, **settings: bool) -> ReplayStore:
        self.store = await ReplayStore.open(
            self.run_dir,
            cases.SMALL.model_copy(update=settings),
            cases.tasks(),
            run_id="run",
            seed=3,
            trajectory_file_bytes=1,
        )
        if self.store.status().head is None:
            await self.store.open_epoch(None)
        return self.store

    async def step(self, *, elsewhere: bool = False) -> None:
        """`elsewhere`: the checkpoint directory is not on this host."""
        previous = self.store.status().chain
        for number, order in enumerate(await self.store.issue(100, self.version)):
            await self.store.offer_many([cases.result(order, self.version, reward=float(number % 2))])
        batch = await self.store.take(self.version, self.version.epoch, timeout_s=1.0)
        self.version = PolicyVersion(self.version.epoch, self.version.step + 1)
        await self.store.commit(
            batch.lease, StepReport(batch_id=batch.lease.batch_id, version=self.version, skipped=False)
        )
        staged = stage(self.run_dir / "checkpoints", self.version)
        members = tuple((item.rollout_id, item.attempt) for item in batch.items)
        stepped = (SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=False),)
        chain = self.store.status().chain
        write_manifest(staged, Manifest(version=self.version, previous_chain=previous, chain=chain, batches=stepped))
        self.checkpoints.append(read_checkpoint(publish(staged, self.version)))
        if elsewhere:
            self.forget(-1)
        await self.store.checkpointed(self.checkpoints[-1])

    def files(self) -> set[str]:
        return {path.name for path in (self.run_dir / "trajectories").glob("*.db")}

    def forget(self, number: int) -> None:
        shutil.rmtree(self.checkpoints[number].path)


async def test_files_covered_by_all_remaining_checkpoints_are_deleted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    async with await run.open():
        await run.step()
        after_one = run.files()
        await run.step()
        assert after_one <= run.files(), "a return to the first checkpoint trains the second batch again"
        run.forget(0)
        await run.step()
        gone = after_one - run.files()
        assert gone
    assert verify(tmp_path).clean


@pytest.mark.parametrize("back_to", [-1, -2])
async def test_a_return_to_any_remaining_checkpoint_finds_its_trajectories(tmp_path: Path, back_to: int) -> None:
    run = Run(tmp_path)
    async with await run.open():
        for number in range(6):
            await run.step()
            if number >= 2:
                run.forget(number - 2)
    kept = run.checkpoints[-2:]
    async with await run.open() as store:
        version = await store.open_epoch(kept[back_to])
        for _ in range(2 if back_to == -2 else 1):
            await store.issue(100, version)
            batch = await store.take(version, version.epoch, timeout_s=1.0)
            if batch is None:
                break
            assert all(item.trajectory.rows for item in batch.items)
            version = PolicyVersion(version.epoch, version.step + 1)
            await store.commit(batch.lease, StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False))
    assert verify(tmp_path).clean


async def test_files_needed_by_a_checkpoint_are_kept_after_the_run_directory_is_moved(tmp_path: Path) -> None:
    run = Run(tmp_path / "before")
    async with await run.open():
        await run.step()
        after_one = run.files()
    run.run_dir = (tmp_path / "before").rename(tmp_path / "after")
    async with await run.open():
        await run.step()
        assert after_one <= run.files(), "a return to the first checkpoint trains the second batch again"
    assert verify(run.run_dir).clean


async def test_each_checkpoint_has_a_copy_of_the_ledger(tmp_path: Path) -> None:
    run = Run(tmp_path)
    async with await run.open():
        for _ in range(2):
            await run.step()
    for number, reference in enumerate(run.checkpoints):
        copied = tmp_path / f"copy-{number}"
        copied.mkdir()
        shutil.copy(Path(reference.path) / "ledger.db", copied)
        assert [commit.chain for commit in read_evidence(copied).commits][-1] == reference.chain


async def test_without_a_checkpoint_directory_no_file_is_deleted(tmp_path: Path) -> None:
    run = Run(tmp_path)
    async with await run.open():
        for _ in range(3):
            before = run.files()
            await run.step(elsewhere=True)
            assert before <= run.files()


async def test_keep_trajectories_keeps_all_files(tmp_path: Path) -> None:
    run = Run(tmp_path)
    async with await run.open(keep_trajectories=True):
        before = set()
        for number in range(4):
            await run.step()
            if number:
                run.forget(number - 1)
            assert before <= run.files()
            before = run.files()
