"""`verify` beside a run that goes on: what is saved while it reads is no contradiction."""

from __future__ import annotations

import asyncio
import runpy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.buffer.store import ReplayStore
from headrace.buffer.types import CheckpointRef
from headrace.buffer.verify import verify
from headrace.policies.checkpoints import Manifest, write_manifest

TESTS = Path(__file__).parents[1]
cases = SimpleNamespace(**runpy.run_path(str(TESTS / "replay_cases.py")))
making = SimpleNamespace(**runpy.run_path(str(TESTS / "golden" / "make_ledger.py"), run_name="making"))


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


@pytest.mark.parametrize("saves", [1, 2, 3])
async def test_what_is_saved_while_verify_reads_is_no_contradiction(tmp_path, saves):
    run_dir = tmp_path / "run"
    async with await ReplayStore.open(run_dir, cases.SMALL, cases.tasks(), run_id="live", seed=3) as store:
        version = await save_a_step(store, run_dir, await store.open_epoch(None))
        loop = asyncio.get_running_loop()

        def look():
            saving = Saving(loop, store, run_dir, version, saves)
            sys.addaudithook(saving.hook)
            return verify(run_dir), saving

        report, saving = await asyncio.to_thread(look)
    assert saving.times == 0
    assert report.problems == ()
    assert report.steps == report.checkpoints == 1 + saves
