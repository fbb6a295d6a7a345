"""The ordinary actors over simulated backends, in start order.

Invariant: nothing here knows time: over the inline runtime in a virtual-time loop, or over Ray in real time, the same
actors run.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.actors.agents.simulated import SimulatedAgent
from headrace.actors.evaluation.evaluator import Evaluator
from headrace.actors.places.sandbox_pool import SandboxPool
from headrace.actors.record.actor_telemetry import ActorTelemetry
from headrace.actors.rollouts.dispatcher import Dispatcher
from headrace.actors.rollouts.stations import WorkerParts
from headrace.actors.rollouts.worker import RolloutWorker
from headrace.actors.run.supervision import Parts
from headrace.actors.simulated.engines import SimulatedEngineGroup
from headrace.actors.training.learner import LearnerLoop
from headrace.actors.training.replay import Replay
from headrace.serve.capture.session import Budgets, Sampling
from headrace.serve.observing.telemetry import TelemetryConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from headrace.actors.record.run_directory import RunDirectory
    from headrace.actors.runtime.runtime import Runtime
    from headrace.actors.simulation.plan import SimulationPlan
    from headrace.sandboxes.base import SandboxProvider

T = TypeVar("T")

UNOBSERVED = ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The actors of one simulated run, started."""

    replay: Replay
    pool: SandboxPool
    evaluator: Evaluator
    engines: SimulatedEngineGroup
    workers: tuple[RolloutWorker, ...]
    dispatcher: Dispatcher
    learner: LearnerLoop

    @property
    def parts(self) -> Parts:
        """What supervision looks at."""
        return Parts(
            learner=self.learner,
            dispatcher=self.dispatcher,
            pool=self.pool,
            evaluator=self.evaluator,
            workers=self.workers,
        )


@asynccontextmanager
async def open_stage(
    plan: SimulationPlan,
    runtime: Runtime,
    *,
    clock: Callable[[], float] = time.time,
    observing: ActorTelemetry = UNOBSERVED,
    directory: RunDirectory | None = None,
    provider: SandboxProvider | None = None,
) -> AsyncIterator[Stage]:
    """Start everything, and stop it in reverse order. Without a directory all is in memory; `provider` stands for the
    plan's simulated one. Raises ConfigError."""
    async with AsyncExitStack() as stack:

        async def spawn(name: str, cls: type[T], *args: Any, **kwargs: Any) -> T:
            actor = await runtime.spawn(cls, *args, name=name, **kwargs)
            stack.push_async_callback(runtime.stop, actor)
            return actor

        kept: dict[str, Any] = {"directory": directory, "clock": clock}
        tasks = plan.task_set()
        replay = await spawn("replay", Replay, plan.buffer_config(), seed=plan.seed, tasks=tasks, **kept)
        pool = await spawn("sandbox-pool", SandboxPool, plan.sandbox_section(), provider=provider, **kept)
        engines = await spawn(
            "engines", SimulatedEngineGroup, plan.engines_config(), observing=observing, directory=directory
        )
        evaluator = await spawn("evaluator", Evaluator, pool, observing)
        parts = WorkerParts(
            pool=pool,
            evaluator=evaluator,
            replay=replay,
            agent=SimulatedAgent(plan.agent_config()),
            gateway=None,
            sampling=Sampling(),
            budgets=Budgets(),
            train_truncated=True,
            rollout=plan.rollout_config(),
            observing=observing,
            simulated_engines=engines,
        )
        workers = [await spawn(f"worker-{number}", RolloutWorker, parts) for number in range(plan.workers)]
        dispatcher = await spawn(
            "dispatcher",
            Dispatcher,
            plan.dispatcher_config(),
            replay=replay,
            pool=pool,
            workers=workers,
            engines=engines,
        )
        learner = await spawn(
            "learner",
            LearnerLoop,
            plan.loop_config(),
            plan.learner_config(None if directory is None else directory.checkpoints),
            replay=replay,
            engines=engines,
            observing=observing,
        )
        yield Stage(
            replay=replay,
            pool=pool,
            evaluator=evaluator,
            engines=engines,
            workers=tuple(workers),
            dispatcher=dispatcher,
            learner=learner,
        )
