"""kill -9 of a training process and of the learner loop at seeded instants."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import psutil
import pytest

from headrace.actors.runtime.actors.operations import until_back
from headrace.buffer.audit.verify import verify
from support import slime_rig as rig
from support.rank_rig import run_on, stepped

pytestmark = [pytest.mark.slime, pytest.mark.timeout(1800), pytest.mark.usefixtures("slime_ray")]

KILLS = 10


async def test_kills_of_a_rank_and_of_the_loop_leave_no_rank_and_the_next_epoch_goes_on(
    tmp_path: Path, bf16_model: Path
) -> None:
    chance = random.Random(17)
    targets = ["loop", "rank 0", "rank 1"] * KILLS
    async with rig.open_run(tmp_path, bf16_model, steps=10_000, save_every=2) as run, run.producing():
        learner = await run.learner()
        running = asyncio.ensure_future(run_on(learner))
        version = await stepped(learner, epoch=1)
        for kill in range(KILLS):
            target = targets[kill]
            before = rig.ranks()
            assert len(before) == rig.RANKS
            # Steps take 0.2 s, saves and snapshots the rest: the instant falls into any of them.
            await asyncio.sleep(chance.uniform(0, 4))
            victim = (await run.runtime.stats(learner))[0] if target == "loop" else before[int(target[-1])].pid
            os.kill(victim, signal.SIGKILL)
            version = await stepped(learner, epoch=version.epoch + 1)
            gone, alive = psutil.wait_procs(before, timeout=0)
            assert alive == [], f"kill {kill} of {target} left {alive}"
            assert len(gone) == rig.RANKS
        await until_back(learner.drain)
        end = await running
        assert end.version.epoch == KILLS + 1
        await run.runtime.stop(learner)
        assert rig.ranks() == []
    report = verify(run.directory.path)
    assert report.clean, report.problems
