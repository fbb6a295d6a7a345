"""Runs whose learner has ranks in processes of their own: finding, striking and outliving them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from headrace.actors.errors import ActorError
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.learner import LearnerLoop, LearnerLoopConfig, TrainingEnd
from headrace.actors.training.rank_group import RankGroup
from headrace.actors.training.replay import Replay
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import DeviceMissing, LearnerError
from headrace.policies.learners.config import LearnerConfig, row_limits
from headrace.policies.learners.simulated import SimulatedEnginesConfig
from headrace.serve.tracing.telemetry import TelemetryConfig
from support import replay_cases
from support.learner_lives import TRIES_OF_A_BATCH, feed

ACTOR = "MegatronRankActor"
WAIT_S = 60.0


class IdleRank:
    """Rank that computes nothing, and imports neither torch nor Megatron. Rank 1 fails."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def place(self) -> tuple[str, int]:
        import ray

        return ray.get_runtime_context().get_node_id(), os.getpid()

    def refuse(self) -> None:
        """Raise an error on rank 1, for which rank 0 waits."""
        if self._rank == 1:
            raise DeviceMissing("rank 1 has no device")
        threading.Event().wait()

    def hang(self) -> None:
        """Stop rank 1, for which rank 0 does not wait."""
        if self._rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


class IdleGroup(RankGroup):
    """Two ranks that compute nothing."""

    passed_on = (LearnerError,)

    def __init__(self) -> None:
        import ray

        super().__init__()
        self._ranks = [ray.remote(IdleRank).options(num_cpus=0).remote(rank) for rank in range(2)]
        self._find_processes()


def rank_processes(actor: str = ACTOR) -> list[psutil.Process]:
    """Processes of this test run's Ray whose actor has this class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if " ".join(process.cmdline()).startswith(f"ray::{actor}"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def strike(process: psutil.Process, method: str, signal_number: int, chance: random.Random) -> None:
    """Send a signal to a rank at a random instant within a call of `method`, which Ray shows in the process's title."""
    durations_s: list[float] = []
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        while not _is_in(process, method) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        began_s = time.monotonic()
        # The first call that is seen is measured.
        instant_s = chance.uniform(0, max(durations_s)) if durations_s else WAIT_S
        while _is_in(process, method) and time.monotonic() - began_s < instant_s:
            time.sleep(0.001)
        if _is_in(process, method):
            os.kill(process.pid, signal_number)
            return
        durations_s.append(time.monotonic() - began_s)
    raise TimeoutError(f"rank {process.pid} was not seen in {method} for {WAIT_S} s")


def _is_in(process: psutil.Process, method: str) -> bool:
    return f"{ACTOR}.{method}" in " ".join(process.cmdline())


async def run_on(learner: LearnerLoop) -> TrainingEnd:
    """Run the learner until it ends, as often as its process dies."""
    while True:
        try:
            return await learner.run()
        except ActorError:
            await until_back(learner.status)


async def stepped(learner: LearnerLoop, *, epoch: int) -> PolicyVersion:
    """Wait for the first committed step of this or a later epoch, and return its version."""
    while True:
        try:
            status = await learner.status()
        except ActorError:
            continue
        if status.last is not None and status.last.version.epoch >= epoch:
            return status.last.version
        await asyncio.sleep(0.05)


@dataclass(frozen=True)
class RankRun:
    """A run directory with its buffer and simulated engines, whose rollouts are finished as soon as they are issued."""

    directory: RunDirectory
    runtime: RayRuntime
    learner: LearnerLoop


@asynccontextmanager
async def open_run(folder: Path, model_dir: Path, *, save_every: int, **changes: Any) -> AsyncIterator[RankRun]:
    """A run of any length; `changes` are keys of [learner]."""
    directory = RunDirectory(path=folder / "run")
    directory.write_beginning(replay_cases.tasks(16), uuid.uuid4().hex)
    runtime = RayRuntime(f"{uuid.uuid4().hex[:6]}-")
    observing = ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=directory.path)
    keys = {"model_dir": model_dir, "checkpoint_dir": directory.checkpoints, "snapshot_dir": directory.path / "weights"}
    config = LearnerConfig.model_validate(keys | changes)
    limits = row_limits(config)
    assert limits is not None
    buffer = BufferConfig(batch_size=4, group_size=2, max_staleness=200, batch_tries=TRIES_OF_A_BATCH)
    parts: dict[str, Any] = {}
    try:
        metrics = observing.metrics()
        parts["replay"] = await runtime.spawn(
            Replay, buffer, directory=directory, seed=3, limits=limits, metrics=metrics, name="replay"
        )
        parts["engines"] = await runtime.spawn(
            SimulatedEngineGroup,
            SimulatedEnginesConfig(push_s=0.0),
            directory=directory,
            name="engines",
        )
        loop = LearnerLoopConfig(steps=10_000, save_every=save_every)
        parts["learner"] = await runtime.spawn(LearnerLoop, loop, config, observing=observing, name="learner", **parts)
        feeding = asyncio.ensure_future(feed(parts["replay"], parts["engines"], limits.vocabulary))
        try:
            yield RankRun(directory=directory, runtime=runtime, learner=parts["learner"])
        finally:
            feeding.cancel()
            with suppress(asyncio.CancelledError):
                await feeding
    finally:
        for actor in reversed(parts.values()):
            await runtime.stop(actor)
