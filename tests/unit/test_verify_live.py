"""`verify` beside a run that goes on: what is saved while it reads is no contradiction."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from golden import make_ledger as making
from headrace.buffer.audit.verify import verify
from headrace.buffer.ledger.archive import ARCHIVE
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.database import connect
from headrace.buffer.trajectories.types import CheckpointRef
from headrace.policies.learners.checkpoints import Manifest, write_manifest
from support import replay_cases as cases

TESTS = Path(__file__).parents[1]


async def save_a_step(store, run_dir, version):
    """One step more, and its checkpoint; the version after it."""
    chain = store.status().chain
    batch, version = await making.step(store, version)
    directory = run_dir / "checkpoints" / str(version)
    directory.mkdir(parents=True)
    manifest = Manifest(version=version, previous_chain=chain, chain=store.status().chain, batches=(batch,))
    write_manifest(directory, manifest)
    await store.checkpointed(
        CheckpointRef(path=str(directory), version=version, batch_ids=(batch.batch_id,), chain=manifest.chain)
    )
    return version


class Saving:
    """Saves steps whenever this thread is about to look at the checkpoints of a run, `times` times."""

    def __init__(self, loop, store, run_dir, version, times):
        self.loop, self.store, self.run_dir, self.version, self.times = loop, store, run_dir, version, times
        self.thread = threading.get_ident()

    def hook(self, event, arguments):
        ours = threading.get_ident() == self.thread and event in ("os.listdir", "os.scandir")
        if not ours or not self.times or str(arguments[0]) != str(self.run_dir / "checkpoints"):
            return
        self.times -= 1
        step = save_a_step(self.store, self.run_dir, self.version)
        self.version = asyncio.run_coroutine_threadsafe(step, self.loop).result(30)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("saves", [1, 2, 3])
async def test_a_checkpoint_saved_while_verify_reads_is_not_a_contradiction(tmp_path, before, saves):
    """With nothing saved before, the archive is begun while it reads."""
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    async with await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="live", seed=3) as store:
        version = await store.open_epoch(None)
        for _ in range(before):
            version = await save_a_step(store, run_dir, version)
        assert (run_dir / ARCHIVE).exists() == bool(before)
        loop = asyncio.get_running_loop()

        def look():
            saving = Saving(loop, store, run_dir, version, saves)
            sys.addaudithook(saving.hook)
            return verify(run_dir), saving

        report, saving = await asyncio.to_thread(look)
    assert saving.times == 0
    assert report.problems == ()
    assert (run_dir / ARCHIVE).exists()
    assert report.steps == report.checkpoints == before + saves


@pytest.mark.parametrize("closed", [False, True])
async def test_an_archive_that_is_just_being_created_is_ignored(tmp_path, closed):
    run_dir = tmp_path / "run"
    async with await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="live", seed=3) as store:
        version = await store.open_epoch(None)
        if closed:
            await save_a_step(store, run_dir, version)
    for file in run_dir.glob(f"{ARCHIVE}*"):
        file.unlink()
    with closing(connect(run_dir / ARCHIVE)):
        problems = verify(run_dir).problems
    assert any(f"{ARCHIVE} is missing" in problem for problem in problems) if closed else problems == ()
