"""Lives of a run of which only the ledger, its copies and the checkpoints are real: `python -m support.simulated_lives
STATE STORAGE STEPS SAVES`.

Trains STEPS steps in all, with checkpoints in STORAGE and the ledger in STATE. With SAVES > 0 the process kills itself
at the first step after the ledger's copy for that checkpoint is complete, and prints the newest copy and the step.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path
from typing import Final

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.storage.restore import link_checkpoints
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.learner import LearnerLoop, LearnerLoopConfig
from headrace.actors.training.replay import Replay
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.tasks.task import write_tasks
from headrace.buffer.trajectories.types import RolloutOrder
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.simulated import SimulatedEnginesConfig, SimulatedLearnerConfig
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import replay_cases as cases

SAVE_EVERY: Final = 3
CONFIG: Final = BufferConfig.model_validate(cases.SMALL.model_dump())
CHECKPOINTS: Final = "checkpoints"


async def feed(replay: Replay, engines: SimulatedEngineGroup, *, held_back: int = 0) -> None:
    """Finish every rollout as soon as it is issued, until cancelled; but `held_back` of them stay in flight."""
    await replay.reconcile([], "feeder")
    chance = random.Random(1)
    waiting: list[RolloutOrder] = []
    while True:
        waiting += (await replay.issue(8, "feeder", timeout_s=1.0)).orders
        # The first orders may come before the first push.
        version = await engines.served_version() or PolicyVersion(1, 0)
        finished, waiting = waiting[held_back:], waiting[:held_back]
        if finished:
            await replay.offer([cases.result(order, version, reward=float(chance.randint(0, 1))) for order in finished])


async def live(state: Path, storage: Path, steps: int, saves: int) -> None:
    """One life of the run, to its end or, with `saves`, to its death."""
    directory = RunDirectory(path=state)
    directory.train_tasks.parent.mkdir(parents=True, exist_ok=True)
    write_tasks(directory.train_tasks, cases.tasks())
    if not directory.identity.exists():
        directory.identity.write_text("run")
    link_checkpoints(state, storage)
    observing = ActorTelemetry(config=TelemetryConfig(), run_dir=state)
    async with (
        Replay(CONFIG, directory=directory, seed=3, copies=storage) as replay,
        SimulatedEngineGroup(SimulatedEnginesConfig(push_s=0.0), directory=directory) as engines,
        LearnerLoop(
            LearnerLoopConfig(steps=steps, save_every=SAVE_EVERY),
            SimulatedLearnerConfig(step_s=0.2, checkpoint_dir=storage / CHECKPOINTS),
            replay=replay,
            engines=engines,
            observing=observing,
        ) as loop,
        asyncio.TaskGroup() as tasks,
    ):
        feeding = tasks.create_task(feed(replay, engines, held_back=1))
        watching = tasks.create_task(kill_after(replay, saves)) if saves else None
        await loop.run()
        for task in (feeding, watching):
            if task is not None:
                task.cancel()


async def kill_after(replay: Replay, saves: int) -> None:
    """Kill this process at the first step after the copy of checkpoint number `saves`."""
    step = saves * SAVE_EVERY
    while True:
        status = await replay.status()
        known = status.ledger_copy and status.ledger_copy.version
        if known and status.head and PolicyVersion.parse(known).step >= step and status.head.step > step:
            sys.stdout.write(f"{known} {status.head.step}\n")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.005)


if __name__ == "__main__":
    asyncio.run(live(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
