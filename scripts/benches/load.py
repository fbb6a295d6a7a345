"""The orchestration bench under a load of simulated rollouts: wall time compared with its ideal, processor time and
memory.

Invariants:
- The ledger is on disk and every result is durable before it counts; there is no gateway, and turns are simulated in
  the workers.
- Times are read from the ledger: from the first attempt that was issued to the last one that ended.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benches.orchestration import Measured, calls_of, idle_cpu, report
from benches.process_tree import cpu_s, memory_bytes
from benches.scaled_replay import prepare_plan
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.rollouts.worker import RolloutWorker
from headrace.actors.run.config import RunConfig
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import InlineRuntime, RayRuntime, Runtime, start_local_ray, stop_local_ray
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.runtime.simulated.tasks import simulated_tasks
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import audit
from headrace.buffer.tasks.task import write_tasks
from headrace.serve.tracing.telemetry import TelemetryConfig

TURNS: Final = 20
GROUP: Final = 8
BATCHES: Final = 8
IDLE_S: Final = 5.0
WARM_UP: Final = 16
"""Number of rollouts evaluated before the measurement, so that all lazy imports are done."""
OBJECT_STORE_BYTES: Final = 128 << 20
MEMORY_ROLLOUTS: Final = 2000
MEMORY_ROLLOUT_S: Final = 40.0
"""Duration of a rollout, long enough for all of them to run at once."""
LOOK_S: Final = 0.5
MB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Measurement of one pass. `wall_s` is from the ledger."""

    measured: Measured
    wall_s: float


def load_plan(*, rollouts: int, in_flight: int, turn_s: float) -> SimulationPlan:
    """Return a plan that makes one pass over the tasks, with rollouts of equal duration, and trains every rollout."""
    rollout_s = TURNS * turn_s
    return SimulationPlan(
        slots=in_flight,
        batch_size=rollouts // BATCHES,
        group_size=GROUP,
        max_staleness=BATCHES,
        steps=BATCHES,
        durations=DurationsConfig(mean_s=rollout_s, median_s=rollout_s, cap_s=rollout_s),
        learner_s=0.05,
        push_s=0.01,
        boot_s=0.005,
        tasks=rollouts // GROUP,
        turns=TURNS,
        save_every=BATCHES,
        buffer={"passes": 1},
    )


def measure_load(folder: Path, *, turn_s: float, rollouts: int = 1024, in_flight: int = 512) -> dict[str, Any]:
    """Measure a pass over Ray and the same pass inline; return the figures over Ray and the difference in cost."""
    plan = load_plan(rollouts=rollouts, in_flight=in_flight, turn_s=turn_s)
    inline = asyncio.run(run_load(plan, InlineRuntime(), RunDirectory(path=folder / "inline")))
    directory = RunDirectory(path=folder / "ray")
    # The run gets its identity with its configuration, later.
    start_local_ray("bench", object_store_bytes=OBJECT_STORE_BYTES)
    try:
        over_ray = asyncio.run(run_load(plan, RayRuntime(), directory))
    finally:
        stop_local_ray()
    ideal_s = rollouts / in_flight * TURNS * turn_s
    return {
        "in_flight": in_flight,
        "turns": TURNS,
        "ideal_s": ideal_s,
        "wall_s": over_ray.wall_s,
        "wall_over_ideal": over_ray.wall_s / ideal_s,
        "inline_wall_s": inline.wall_s,
        **report(over_ray.measured, inline.measured),
    }


async def run_load(
    plan: SimulationPlan,
    runtime: Runtime,
    directory: RunDirectory,
    *,
    idle_s: float = IDLE_S,
    telemetry: TelemetryConfig | None = None,
) -> Loaded:
    """Run one pass over all tasks to the last step, after measuring the idle actors for `idle_s`. Without `telemetry`
    there are no spans."""
    config = prepare_plan(plan, directory)
    config = config.model_copy(update={"telemetry": telemetry or TelemetryConfig(enabled=False)})
    warm_up = simulated_tasks(plan.seed, WARM_UP, evaluate_s=0.0, family="warm-up")
    write_tasks(directory.heldout_tasks, warm_up)
    async with Service(config, directory, runtime) as service:
        await service.actors.learner.open()
        await service.actors.dispatcher.evaluate(warm_up, samples=1, tag="warm-up")
        idle_cpu_per_s = await idle_cpu(idle_s)
        parts = (
            service.actors.replay,
            service.actors.pool,
            service.actors.evaluators[0],
            service.actors.engines,
            service.actors.dispatcher,
            service.actors.learner,
        )
        actors: list[object] = [*parts, *service.actors.workers]
        calls, used_s, start_s = await calls_of(runtime, actors), cpu_s(), time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.actors.dispatcher.run())
            await service.actors.learner.run()
            measured = Measured(
                cpu_s=cpu_s() - used_s,
                wall_s=time.monotonic() - start_s,
                calls=await calls_of(runtime, actors) - calls,
                rollouts=plan.steps * plan.batch_size,
                idle_cpu_per_s=idle_cpu_per_s,
            )
            running.cancel()
    evidence = read_evidence(directory.path)
    problems = audit(evidence).problems
    assert not problems, problems
    ended_s = [attempt.ended_at_s for attempt in evidence.attempts if attempt.ended_at_s is not None]
    wall_s = max(ended_s) - min(attempt.issued_at_s for attempt in evidence.attempts)
    return Loaded(measured=measured, wall_s=wall_s)


def measure_memory(folder: Path, *, rollouts: int = MEMORY_ROLLOUTS) -> dict[str, Any]:
    """Measure the memory of the whole service, including Ray and driver, with this number of rollouts running."""
    plan = load_plan(rollouts=rollouts, in_flight=rollouts, turn_s=MEMORY_ROLLOUT_S / TURNS)
    directory = RunDirectory(path=folder / "memory")
    config = prepare_plan(plan, directory)
    start_local_ray(directory.run_id(), object_store_bytes=config.service.object_store_bytes)
    try:
        return asyncio.run(_memory(config, directory, rollouts))
    finally:
        stop_local_ray()


async def _memory(config: RunConfig, directory: RunDirectory, rollouts: int) -> dict[str, Any]:
    runtime = RayRuntime()
    service = await runtime.spawn(Service, config, directory, runtime, name="service")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(service.run())
        worker = await runtime.find(RolloutWorker, "worker-0")
        # Polled rarely, since each status is a call.
        while (await worker.status()).phases.get("agent", 0) < rollouts:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        found = memory_bytes()
        in_flight = (await worker.status()).phases.get("agent", 0)
        running.cancel()
    await runtime.stop(service)
    return {
        "in_flight": in_flight,
        "pss_mb": sum(found.values()) / MB,
        "pss_mb_by_process": {name: size / MB for name, size in sorted(found.items(), key=lambda item: -item[1])},
    }
