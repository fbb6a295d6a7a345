"""The orchestration bench: rollouts whose agent returns immediately, with the real actors over Ray and inline.

The reported CPU time is that of all processes of the run over Ray, minus that of the idle cluster over the same time,
minus that of the same work under the inline runtime (at most 3 ms and 2 calls per rollout).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benches.process_tree import cpu_s
from headrace.actors.agents.programs.agent import ImmediateAgent
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.rollouts.dispatcher import Dispatcher, DispatcherConfig
from headrace.actors.rollouts.rollout import RolloutConfig
from headrace.actors.rollouts.stations import SourceParts, WorkerParts
from headrace.actors.rollouts.worker import RolloutWorker
from headrace.actors.runtime.actors.runtime import InlineRuntime, RayRuntime, Runtime, start_local_ray, stop_local_ray
from headrace.actors.runtime.pools.config import SandboxKind, SandboxSection
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.training.replay import Replay
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.buffer.tasks.evaluators import NoEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.sandboxes.pool.pool import PoolConfig
from headrace.sandboxes.simulated.provider import SimulationConfig
from headrace.serve.gateway.capture.session import Budgets, Sampling, TrainedPart
from headrace.serve.tracing.telemetry import TelemetryConfig

T = TypeVar("T")

SLOTS = 256
STATUS_S = 0.25
IDLE_S = 5.0
OBJECT_STORE_BYTES = 128 << 20
AT_ONCE = SandboxSection(
    provider=SandboxKind.SIMULATED,
    simulated=SimulationConfig(boot_s=0.001, answer_s=0),
    pool=PoolConfig(max_live=2 * SLOTS),
)
"""Simulated sandboxes without delays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurement of one pass. `calls` are the calls received by all actors; `idle_cpu_per_s` is the CPU of the same
    processes when idle."""

    cpu_s: float
    wall_s: float
    calls: int
    rollouts: int
    idle_cpu_per_s: float


def measure(folder: Path, *, rollouts: int) -> dict[str, Any]:
    """Run both passes, and report their difference."""
    inline = asyncio.run(_pass(InlineRuntime(), prepare_directory(folder / "inline"), rollouts))
    directory = prepare_directory(folder / "ray")
    start_local_ray(directory.run_id(), object_store_bytes=OBJECT_STORE_BYTES)
    try:
        over_ray = asyncio.run(_pass(RayRuntime(), directory, rollouts))
    finally:
        stop_local_ray()
    return report(over_ray, inline)


def report(over_ray: Measured, inline: Measured) -> dict[str, Any]:
    """Return the CPU over Ray minus idle minus inline, per rollout."""
    idle_s = over_ray.idle_cpu_per_s * over_ray.wall_s
    inline_s = inline.cpu_s * over_ray.rollouts / inline.rollouts
    per_rollout_ms = 1000 / over_ray.rollouts
    return {
        "ray_cpu_ms_per_rollout": (over_ray.cpu_s - idle_s - inline_s) * per_rollout_ms,
        "ray_calls_per_rollout": over_ray.calls / over_ray.rollouts,
        "rollouts": over_ray.rollouts,
        "rollouts_per_s": over_ray.rollouts / over_ray.wall_s,
        "total_cpu_ms_per_rollout": over_ray.cpu_s * per_rollout_ms,
        "idle_cpu_ms_per_rollout": idle_s * per_rollout_ms,
        "inline_cpu_ms_per_rollout": inline_s * per_rollout_ms,
    }


async def _pass(runtime: Runtime, directory: RunDirectory, rollouts: int) -> Measured:
    """Spawn the actors, warm them up by filling the slots once, run `rollouts` rollouts, and measure."""
    async with AsyncExitStack() as stack:

        async def spawn(cls: type[T], *args: Any, name: str, **kwargs: Any) -> T:
            actor = await runtime.spawn(cls, *args, name=name, **kwargs)
            stack.push_async_callback(runtime.stop, actor)
            actors.append(actor)
            return actor

        actors: list[object] = []
        buffer = BufferConfig(batch_size=SLOTS, group_size=8, max_staleness=1)
        replay = await spawn(Replay, buffer, directory=directory, seed=0, name="replay")
        await replay.open_epoch(None)
        pool = await spawn(SandboxPool, AT_ONCE, directory=directory, name="sandbox-pool")
        evaluator = await spawn(
            Evaluator, pool, without_spans(directory), TaskCatalog(train=directory.train_tasks), name="evaluator"
        )
        worker = await spawn(RolloutWorker, immediate_parts(directory, replay, pool, evaluator), name="worker")
        config = DispatcherConfig(slots_per_worker=SLOTS)
        dispatcher = await spawn(Dispatcher, config, replay=replay, pool=pool, workers=[worker], name="dispatcher")
        async with asyncio.TaskGroup() as tasks:
            idle_cpu_per_s = await idle_cpu(IDLE_S)
            running = tasks.create_task(dispatcher.run())
            await _finished(dispatcher, SLOTS)
            done, calls = await _finished(dispatcher, 0), await calls_of(runtime, actors)
            used_s, start = cpu_s(), time.monotonic()
            reached = await _finished(dispatcher, done + rollouts)
            measured = Measured(
                cpu_s=cpu_s() - used_s,
                wall_s=time.monotonic() - start,
                calls=await calls_of(runtime, actors) - calls,
                rollouts=reached - done,
                idle_cpu_per_s=idle_cpu_per_s,
            )
            running.cancel()
        return measured


def immediate_parts(directory: RunDirectory, replay: Replay, pool: SandboxPool, evaluator: Evaluator) -> WorkerParts:
    """Return the parts of a worker whose agent returns immediately without calling the policy."""
    return WorkerParts(
        pool=pool,
        evaluator=evaluator,
        replay=replay,
        sources={
            "": SourceParts(
                agent=ImmediateAgent(),
                sampling=Sampling(),
                budgets=Budgets(),
                train_truncated=True,
                train_cut=False,
                train=(TrainedPart.MAIN,),
                serve_unhonoured=True,
                rollout=RolloutConfig(),
            )
        },
        lease_s=RolloutConfig().lease_s,
        tasks=TaskCatalog(train=directory.train_tasks),
        gateways=(),
        observing=without_spans(directory),
    )


def without_spans(directory: RunDirectory) -> ActorTelemetry:
    return ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=directory.path)


def prepare_directory(path: Path) -> RunDirectory:
    """Create a run directory with tasks that need no evaluation."""
    directory = RunDirectory(path=path)
    evaluator = NoEvaluator()
    tasks = [Task(id=TaskId(f"none-{n}"), family="none", instruction="return", evaluator=evaluator) for n in range(64)]
    directory.write_beginning(tasks, "orchestration")
    return directory


async def _finished(dispatcher: Dispatcher, at_least: int) -> int:
    """Wait until `at_least` rollouts have finished; return their number."""
    # Polled rarely, since each status is a call.
    while (finished := (await dispatcher.status()).finished) < at_least:  # noqa: ASYNC110
        await asyncio.sleep(STATUS_S)
    return finished


async def calls_of(runtime: Runtime, actors: list[object]) -> int:
    return sum([(await runtime.stats(actor))[1] for actor in actors])


async def idle_cpu(seconds: float) -> float:
    """Return the CPU seconds per second while all actors are idle."""
    before, start = cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (cpu_s() - before) / (time.monotonic() - start)
