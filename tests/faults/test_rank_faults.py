"""Ranks of the Megatron learner that die or hang: the run goes on in the next epoch and loses nothing."""

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
from headrace.policies.learners.checkpoints import usable_checkpoint
from support import rank_rig as rig

GUARD_S = 300

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(GUARD_S)]

KILLED_IN_A_STEP = ("step", signal.SIGKILL)
KILLED_IN_A_SAVE = ("save_state", signal.SIGKILL)
HUNG_IN_A_STEP = ("step", signal.SIGSTOP)
HUNG_IN_A_SAVE = ("save_state", signal.SIGSTOP)
STOPPED_AND_ORPHANED = ("digest", signal.SIGSTOP)
"""After this one, the learner's process is killed."""


async def live_through(folder: Path, model_dir: Path, faults: list[tuple[str, signal.Signals]], *, seed: int) -> None:
    """Train with two ranks and strike one of them, again and again. A hung rank is given up after 15 s, which a busy
    machine may need for a step."""
    chance = random.Random(seed)
    async with rig.open_run(folder, model_dir, save_every=2, ranks=2, rank_timeout_s=15.0) as run:
        running = asyncio.ensure_future(rig.run_on(run.learner))
        version = await rig.stepped(run.learner, epoch=1)
        for number, (method, signal_number) in enumerate(faults):
            before = rig.rank_processes()
            assert len(before) == 2
            await asyncio.to_thread(rig.strike, chance.choice(before), method, signal_number, chance)
            if (method, signal_number) == STOPPED_AND_ORPHANED:
                os.kill((await run.runtime.stats(run.learner))[0], signal.SIGKILL)
            version = await rig.stepped(run.learner, epoch=version.epoch + 1)
            gone, alive = psutil.wait_procs(before, timeout=0)
            assert alive == [], f"fault {number}, {signal_number.name} in {method}, left {alive}"
            assert len(gone) == 2
        await until_back(run.learner.drain)
        end = await running
        assert end.version.epoch == len(faults) + 1
        last = rig.rank_processes()
        await run.runtime.stop(run.learner)
        assert psutil.wait_procs(last, timeout=0)[1] == [], "ranks end with their learner"
    report = verify(run.directory.path)
    assert report.clean, report.problems
    assert (report.trained_twice, report.lost) == (0, 0)
    usable = usable_checkpoint(run.directory.checkpoints)
    assert usable.set_aside == (), "no interrupted save counts as a checkpoint"
    assert usable.checkpoint is not None
    assert usable.checkpoint.version == end.version


async def test_a_run_outlives_the_kills_of_a_rank(tmp_path: Path, tiny_model_dir: Path) -> None:
    await live_through(tmp_path, tiny_model_dir, [KILLED_IN_A_STEP, KILLED_IN_A_SAVE, KILLED_IN_A_STEP], seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "faults",
    [[KILLED_IN_A_STEP, KILLED_IN_A_SAVE] * 20, [HUNG_IN_A_STEP, HUNG_IN_A_SAVE, STOPPED_AND_ORPHANED]],
    ids=["killed", "hung"],
)
async def test_a_run_outlives_kills_and_hangs_at_many_instants(
    tmp_path: Path, tiny_model_dir: Path, faults: list[tuple[str, signal.Signals]]
) -> None:
    await live_through(tmp_path, tiny_model_dir, random.Random(2).sample(faults, len(faults)), seed=2)
