"""The trainer of docs/external_trainer.md, run as it stands there: over HTTP, with plain PyTorch, against a learner
that is a Ray actor. It is killed in the middle of the run, and started again."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import uvicorn

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.actors.call_guard import keep_running
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.external_loop import LEARNER, ExternalTrainerLoop
from headrace.actors.training.learner import LearnerLoopConfig
from headrace.actors.training.replay import Replay
from headrace.buffer.audit.verify import verify
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.trajectories.types import RolloutOrder
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.checkpoints import check_checkpoint
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.simulated import SimulatedEnginesConfig
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import replay_cases as cases
from support.control_rig import ControlRig
from support.external_trainer import trainer_of_the_docs
from support.runs_without_services import RECIPE

pytestmark = pytest.mark.usefixtures("ray_cluster")

MOST_LINES: Final = 60
STEPS: Final = 8
SAVE_EVERY: Final = 3
GUARD_S: Final = 240
SMALL: Final = BufferConfig(batch_size=4, group_size=2, max_staleness=2)


def test_the_trainer_is_short() -> None:
    assert len(trainer_of_the_docs().splitlines()) <= MOST_LINES


class Actors:
    """Buffer, engines and learner of a run, with rollouts that end as soon as they are issued."""

    replay: Replay
    engines: SimulatedEngineGroup
    learner: ExternalTrainerLoop

    def __init__(self, directory: RunDirectory, model: Path) -> None:
        self.directory, self.model = directory, model

    @asynccontextmanager
    async def started(self) -> AsyncIterator[None]:
        runtime = RayRuntime(namespace="external-trainer")
        learner = LearnerConfig(
            kind="external",
            model_dir=self.model,
            checkpoint_dir=self.directory.checkpoints,
            snapshot_dir=self.directory.weights,
        )
        observing = ActorTelemetry(config=TelemetryConfig(), run_dir=self.directory.path)
        spawned: list[object] = []

        async def spawn(name: str, cls: type, *args: object, **kwargs: object) -> Any:
            spawned.append(actor := await runtime.spawn(cls, *args, name=name, **kwargs))
            return actor

        try:
            self.replay = await spawn("replay", Replay, SMALL, directory=self.directory, seed=3)
            self.engines = await spawn(
                "engines", SimulatedEngineGroup, SimulatedEnginesConfig(push_s=0.0), directory=self.directory
            )
            loop = LearnerLoopConfig(steps=STEPS, save_every=SAVE_EVERY)
            self.learner = await spawn(
                LEARNER,
                ExternalTrainerLoop,
                loop,
                learner,
                replay=self.replay,
                engines=self.engines,
                observing=observing,
            )
            yield
        finally:
            for actor in reversed(spawned):
                await runtime.stop(actor)

    async def feed(self) -> None:
        """Finish every rollout as soon as it is issued, until cancelled. Odd rewards depend on nothing."""
        await self.replay.reconcile([], "feeder")
        chance = random.Random(1)
        while True:
            orders = (await self.replay.issue(8, "feeder", timeout_s=1.0)).orders
            version = await self.engines.served_version() or PolicyVersion(1, 0)
            if orders:
                await self.replay.offer([self._result(order, version, chance) for order in orders])

    def _result(self, order: RolloutOrder, version: PolicyVersion, chance: random.Random) -> Any:
        return cases.result(order, version, reward=float(chance.randint(0, 1)), vocabulary=200)


@contextmanager
def trainer(script: Path, *words: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(script.parent),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, script, *words], stdout=output, stderr=output, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@asynccontextmanager
async def serving(rig: ControlRig) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(rig.app, log_level="error", lifespan="off"))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(server.serve(sockets=[listener]))
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            server.should_exit = True
            await running


@pytest.mark.timeout(GUARD_S + 60)
async def test_the_trainer_of_the_docs_is_killed_and_goes_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    directory = RunDirectory(path=tmp_path / "run")
    directory.write_beginning(cases.tasks(), "run")
    script, key, log = tmp_path / "trainer.py", tmp_path / "key", tmp_path / "trainer.log"
    script.write_text(trainer_of_the_docs(), encoding="utf-8")
    key.write_text("alice\n")
    rig, actors = ControlRig(tmp_path), Actors(directory, tiny_model_dir)
    made = await rig.call("POST", "/v1/runs", {"name": "run", "recipe": RECIPE}, idempotency_key="one")
    run_id = made.document["run_id"]
    async with asyncio.timeout(GUARD_S), actors.started(), serving(rig) as url, asyncio.TaskGroup() as tasks:
        rig.runs.learner = actors.learner
        feeding = tasks.create_task(actors.feed())
        running = tasks.create_task(keep_running(actors.learner.run, actors.learner.status))
        words = (url, str(key), run_id)
        with trainer(script, *words, log=log) as first:
            # Past a checkpoint, so that a step is undone.
            while not await reached(actors, SAVE_EVERY + 1):
                assert first.poll() is None, log.read_text()
        with trainer(script, *words, log=log) as second:
            end = await running
            assert await asyncio.to_thread(second.wait) == 0, log.read_text()
        feeding.cancel()
    assert (end.version.step, end.used_up) == (STEPS, False)
    assert end.version.epoch == 2
    check_checkpoint(directory.checkpoints / f"2.{STEPS}")
    assert (directory.checkpoints / f"2.{STEPS}" / "optimizer.pt").is_file()
    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.steps, report.steps_rolled_back > 0) == (STEPS, True)
    assert (report.trained_twice, report.lost) == (0, 0)
    assert report.max_staleness_seen <= SMALL.max_staleness


async def reached(actors: Actors, step: int) -> bool:
    version = (await until_back(actors.learner.status)).version
    return version is not None and version.step >= step
