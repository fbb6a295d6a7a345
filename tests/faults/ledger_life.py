"""A process that lives on a run directory until it is killed: `python ledger_life.py RUN_DIR SEED`.

It opens the newest checkpoint as a new learner, then issues, offers, trains and saves without end. Each line on
standard output tells what has been acknowledged to it, after the acknowledgement.
"""

from __future__ import annotations

import asyncio
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

from headrace.buffer.replay import BufferConfig
from headrace.buffer.store import ReplayStore
from headrace.buffer.types import Cause, ReceiptStatus, StepReport
from headrace.buffer.versions import PolicyVersion
from headrace.policies.checkpoints import (
    Manifest,
    SteppedBatch,
    latest_checkpoint,
    publish,
    read_checkpoint,
    stage,
    write_manifest,
)

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "replay_cases.py")))
CONFIG = BufferConfig(batch_size=8, group_size=4, max_staleness=2)


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def offer(store, version, chance):
    orders = await store.issue(16, version)
    results = []
    for order in orders:
        if chance.random() < 0.1:
            results.append(cases.ended(order, chance.choice([Cause.INFRA, Cause.CANCELLED])))
        else:
            results.append(cases.result(order, version, reward=float(chance.randint(0, 1)), tokens=50))
    parts = [results[start : start + 5] for start in range(0, len(results), 5)]
    async with asyncio.TaskGroup() as group:
        offers = [group.create_task(store.offer_many(part)) for part in parts]
    for part, task in zip(parts, offers, strict=True):
        for result, receipt in zip(part, task.result(), strict=True):
            if receipt.status is ReceiptStatus.ACCEPTED and result.trajectory is not None:
                say("offered", result.rollout_id, result.attempt)


def save(run_dir, version, previous_chain, chain, batches):
    staged = stage(run_dir / "checkpoints", version)
    write_manifest(
        staged, Manifest(version=version, previous_chain=previous_chain, chain=chain, batches=tuple(batches))
    )
    return read_checkpoint(publish(staged, version))


async def live(run_dir: Path, seed: int):
    chance = random.Random(seed)
    resume = latest_checkpoint(run_dir / "checkpoints")
    async with await ReplayStore.open(run_dir, CONFIG, cases.tasks(), run_id="run", seed=3) as store:
        version = await store.open_epoch(resume)
        await store.restart_in_flight()
        chain, stepped = resume.chain if resume else "", []
        say("opened", version)
        while True:
            await offer(store, version, chance)
            batch = await store.take(version, version.epoch, timeout_s=0.0)
            if batch is None:
                continue
            members = tuple((item.rollout_id, item.attempt) for item in batch.items)
            stepped.append(SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=False))
            version = PolicyVersion(version.epoch, version.step + 1)
            report = StepReport(batch_id=batch.lease.batch_id, version=version, skipped=False)
            await store.commit(batch.lease, report)
            say("committed", version, batch.lease.batch_id)
            if len(stepped) == 3:
                ref = save(run_dir, version, chain, store.status().chain, stepped)
                say("saved", version)
                await store.checkpointed(ref)
                chain, stepped = ref.chain, []


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), int(sys.argv[2])))
