"""The service: start order, supervision, evaluations, end of a run.

Invariants:
- Every actor is named; a restarted service finds those that live and starts those that do not.
- A lost actor is called again when Ray has restarted it; what it was doing is repeated idempotently or abandoned by
  the buffer.
- An actor that answers nothing for `hang_s` is killed. (The service itself is guarded by its driver, `launch`.)
- A run ends: with its steps done, drained, or with an error that says why. A stall is such an error.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Self, TypeVar

from headrace.actors.choosing import make_agent
from headrace.actors.dispatcher import Dispatcher
from headrace.actors.engines import EngineGroup, EnginesConfig
from headrace.actors.errors import ActorLost, DiskFull, RunStalled, first_cause
from headrace.actors.evaluator import Evaluator
from headrace.actors.gateway import GatewayActor
from headrace.actors.guarding import guard, keep_running
from headrace.actors.headway import Headway
from headrace.actors.learner import LearnerLoop
from headrace.actors.metrics import read_metrics
from headrace.actors.observing import Observing
from headrace.actors.owning import Owning
from headrace.actors.replay import Replay
from headrace.actors.retry import until_back
from headrace.actors.sandbox_pool import SandboxPool
from headrace.actors.worker import RolloutWorker, WorkerParts
from headrace.buffer.tasks import load_tasks
from headrace.serve.capture.session import FINAL_TEXT, Budgets, Sampling
from headrace.serve.gateway import GatewayConfig
from headrace.serve.observing.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.actors.config import RunConfig
    from headrace.actors.run_directory import RunDirectory
    from headrace.actors.runtime import Runtime
    from headrace.buffer.types import StepReport

R = TypeVar("R")

SUPERVISION_S = 1.0
"""How often progress is read."""
STATUS_TIMEOUT_S = 5.0
"""A part that tells nothing for so long is shown without a value."""

logger = logging.getLogger(__name__)


class Service(Owning):
    """One run from first to last step."""

    def __init__(self, config: RunConfig, directory: RunDirectory, runtime: Runtime) -> None:
        super().__init__()
        self._config = config
        self._directory = directory
        self._runtime = runtime
        self._observing = Observing(config=config.telemetry, run_dir=directory.path)
        self._actors: dict[str, object] = {}
        self._started_s = time.monotonic()
        self._phase = "starting"
        self._draining = False
        self._step = 0
        self._ended = False
        self._moved = asyncio.Event()
        self._success: float | None = None
        self._rewards: deque[float] = deque(maxlen=32)
        self._last_tokens = (time.monotonic(), 0)
        self._tokens_per_s = 0.0

    async def __aenter__(self) -> Self:
        self._heldout = load_tasks(self._directory.heldout_tasks)[: self._config.evaluation.tasks]
        self._metrics = self._observing.metrics()
        try:
            await self._start_stores()
            await self._start_workers()
            await self._start_loops()
        except BaseExceptionGroup as group:
            await self._stack.aclose()
            raise first_cause(group) from group
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def run(self) -> bool:
        """Evaluate, train, evaluate. True when all steps are done, False when the run was drained before.

        Raises RunStalled, DiskFull, and what ends the learner or the dispatcher for good.
        """
        self._ended = False
        try:
            async with asyncio.TaskGroup() as tasks:
                guards = [
                    tasks.create_task(guard(self._runtime, name, actor, self._config.service.hang_s))
                    for name, actor in self._actors.items()
                ]
                supervision = tasks.create_task(self._supervise())
                done = await self._train_and_evaluate(tasks)
                for task in (supervision, *guards):
                    task.cancel()
        except BaseExceptionGroup as group:
            # Whatever it broke: a full disk is the cause.
            self._refuse_full_disk()
            raise first_cause(group) from group
        finally:
            self._ended = True
            self._moved.set()
        self._phase = "done" if done else "drained"
        return done

    async def progress(self) -> Progress:
        """One moment of the run; parts that are restarting show their last or no value."""
        learner, dispatcher, pool, gateway = await asyncio.gather(
            _or_none(self._learner.status),
            _or_none(self._dispatcher.status),
            _or_none(self._pool.status),
            _or_none(self._gateway.stats),
        )
        self._count_tokens(gateway.sampled_tokens if gateway else 0)
        last = learner.last if learner else None
        return Progress(
            phase=self._phase,
            step=learner.version.step if learner and learner.version else 0,
            total_steps=self._config.training.steps,
            version=str(learner.version) if learner and learner.version else "-",
            elapsed_s=time.monotonic() - self._started_s,
            reward=dispatcher.mean_reward if dispatcher else None,
            held_out_success=self._success,
            mean_staleness=last.metrics.get("mean_staleness") if last else None,
            rollouts_in_flight=dispatcher.in_flight + dispatcher.evaluating if dispatcher else 0,
            sandboxes=pool.live if pool else 0,
            tokens_per_s=self._tokens_per_s,
            learner_idle_share=learner.idle_share if learner else None,
            infra_failures=dispatcher.infra if dispatcher else 0,
            parser_fails=gateway.parser_fails if gateway else False,
            rewards=tuple(self._rewards),
        )

    async def drain(self) -> None:
        """Stop issuing, save after the step under way, and let `run` return False."""
        self._phase, self._draining = "draining", True
        await until_back(self._learner.drain)

    async def reached(self, step: int) -> bool:
        """True once the learner has committed so many optimizer updates, False when `run` ended before it had."""
        while self._step < step and not self._ended:
            self._moved.clear()
            await self._moved.wait()
        return self._step >= step

    async def process_ids(self) -> dict[str, int]:
        """Process id by actor name; for operators and fault tests."""
        return {name: (await self._runtime.stats(actor))[0] for name, actor in self._actors.items()}

    async def _train_and_evaluate(self, tasks: asyncio.TaskGroup) -> bool:
        await keep_running(self._learner.open, self._learner.status)
        self._phase = "base evaluation"
        await self._evaluate_once("base", self._config.evaluation.samples)
        self._phase = "training"
        dispatching = tasks.create_task(keep_running(self._dispatcher.run, self._dispatcher.status))
        on_the_way = tasks.create_task(self._evaluate_on_the_way())
        # One that died meanwhile may not know that the run drains.
        await until_back(self._ready_learner)
        version = await keep_running(self._learner.run, self._ready_learner)
        # Supervision may have seen none of the steps: a service that came back late finds them all done.
        learner = await _or_none(self._learner.status)
        self._note(version.step, learner.last if learner else None)
        for task in (dispatching, on_the_way):
            task.cancel()
        await until_back(self._dispatcher.stop_training)
        if version.step < self._config.training.steps:
            return False
        self._phase = "final evaluation"
        await self._evaluate_once("final", self._config.evaluation.samples)
        return True

    async def _ready_learner(self) -> None:
        """A new incarnation of the learner knows nothing of a drain that was asked for before."""
        await self._learner.status()
        if self._draining:
            await self._learner.drain()

    async def _evaluate_on_the_way(self) -> None:
        """Held-out success every so many steps, while training goes on; the base and final evaluations are separate."""
        every = self._config.evaluation.every_steps
        if not every:
            return
        for step in range(every, self._config.training.steps, every):
            if not await self.reached(step):
                return
            await self._evaluate_once(f"step-{step}", self._config.evaluation.samples_on_the_way)

    async def _evaluate_once(self, tag: str, samples: int) -> None:
        """Run and record one evaluation; a resumed run leaves out what it has."""
        done = [record for record in read_metrics(self._directory.metrics) if record["kind"] == "evaluation"]
        if (known := next((record for record in done if record["tag"] == tag), None)) is not None:
            self._success = known["success"]
            return
        summary = await keep_running(
            lambda: self._dispatcher.evaluate(self._heldout, samples=samples, tag=tag), self._dispatcher.status
        )
        if summary.success is None:
            logger.error("evaluation %s: every answer was infra; nothing is recorded", tag)
            return
        self._success = summary.success
        self._metrics.append("evaluation", {"step": 0 if tag == "base" else self._step, **asdict(summary)})

    async def _supervise(self) -> None:
        """Notice steps and stalls: a run that gets nowhere ends with what each part was doing."""
        headway = Headway(time.monotonic(), self._config.service.stall_s)
        while True:
            await asyncio.sleep(SUPERVISION_S)
            self._refuse_full_disk()
            learner = await _or_none(self._learner.status)
            dispatcher = await _or_none(self._dispatcher.status)
            if learner and learner.version:
                self._note(learner.version.step, learner.last)
            if (reason := headway.stalled(time.monotonic(), learner, dispatcher)) is not None:
                raise RunStalled(f"{reason}; {await self._diagnosis()}")

    def _note(self, step: int, last: StepReport | None) -> None:
        """Wake who waits for a step, and keep its reward for the display; nothing when the step is known."""
        if step <= self._step:
            return
        self._step = step
        self._moved.set()
        if last is not None and (reward := last.metrics.get("mean_reward")) is not None:
            self._rewards.append(reward)

    def _refuse_full_disk(self) -> None:
        free_bytes = shutil.disk_usage(self._directory.path).free
        if free_bytes < self._config.service.min_free_bytes:
            raise DiskFull(
                f"the disk of {self._directory.path} has {free_bytes >> 20} MiB left, less than service.min_free_bytes "
                f"({self._config.service.min_free_bytes >> 20} MiB): free some space, then resume the run"
            )

    async def _diagnosis(self) -> str:
        progress = await self.progress()
        replay = await _or_none(self._replay.status)
        return (
            f"phase {progress.phase}, step {progress.step}, "
            f"{progress.rollouts_in_flight} rollouts in flight, {progress.sandboxes} sandboxes, buffer {replay}"
        )

    def _count_tokens(self, total: int) -> None:
        now, (then, before) = time.monotonic(), self._last_tokens
        if now > then:
            self._tokens_per_s = max(0, total - before) / (now - then)
        self._last_tokens = (now, total)

    async def _start_stores(self) -> None:
        config, directory = self._config, self._directory
        async with asyncio.TaskGroup() as starting:
            replay = starting.create_task(
                self._spawn("replay", Replay, config.buffer, directory=directory, seed=config.service.seed)
            )
            pool = starting.create_task(self._spawn("sandbox-pool", SandboxPool, config.sandbox, directory=directory))
            gateway = starting.create_task(
                self._spawn(
                    "gateway",
                    GatewayActor,
                    GatewayConfig(
                        tokenizer_dir=config.model.path,
                        session_log_dir=directory.path / "sessions",
                        **config.gateway.model_dump(),
                    ),
                    address_file=directory.path / "gateway.json",
                    observing=self._observing,
                )
            )
        self._replay, self._pool, self._gateway = replay.result(), pool.result(), gateway.result()

    async def _start_workers(self) -> None:
        config = self._config
        async with asyncio.TaskGroup() as starting:
            engines = starting.create_task(
                self._spawn(
                    "engines",
                    EngineGroup,
                    _engines(config),
                    config.push,
                    gateway=self._gateway,
                    model_dir=config.model.path,
                    seed=config.service.seed,
                    observing=self._observing,
                )
            )
            evaluator = starting.create_task(self._spawn("evaluator", Evaluator, self._pool, self._observing))
        self._engines = engines.result()
        parts = await self._worker_parts(evaluator.result())
        async with asyncio.TaskGroup() as starting:
            workers = [
                starting.create_task(self._spawn(f"worker-{index}", RolloutWorker, parts))
                for index in range(config.service.workers)
            ]
        self._workers = [worker.result() for worker in workers]

    async def _start_loops(self) -> None:
        config = self._config
        async with asyncio.TaskGroup() as starting:
            dispatcher = starting.create_task(
                self._spawn(
                    "dispatcher",
                    Dispatcher,
                    config.dispatcher,
                    replay=self._replay,
                    pool=self._pool,
                    workers=self._workers,
                )
            )
            learner = starting.create_task(
                self._spawn(
                    "learner",
                    LearnerLoop,
                    config.training,
                    config.learner,
                    replay=self._replay,
                    engines=self._engines,
                    observing=self._observing,
                )
            )
        self._dispatcher, self._learner = dispatcher.result(), learner.result()

    async def _worker_parts(self, evaluator: Evaluator) -> WorkerParts:
        config = self._config
        return WorkerParts(
            pool=self._pool,
            evaluator=evaluator,
            replay=self._replay,
            agent=make_agent(config.agent),
            gateway=await until_back(self._gateway.address),
            sampling=Sampling(temperature=config.sampling.temperature),
            budgets=Budgets(
                max_turns=config.agent.max_turns,
                max_tokens_per_turn=config.sampling.max_tokens_per_turn,
                max_context_tokens=config.sampling.max_context_tokens,
                max_sampled_tokens=config.sampling.max_sampled_tokens,
                wall_s=config.rollout.agent_timeout_s,
                final_text=FINAL_TEXT if config.agent.is_program else "",
            ),
            train_truncated=config.sampling.train_truncated,
            rollout=config.rollout,
            observing=self._observing,
        )

    async def _spawn(self, name: str, cls: type[R], *args: object, **kwargs: object) -> R:
        actor = await self._runtime.spawn(cls, *args, name=name, **kwargs)
        self._actors[name] = actor
        self._stack.push_async_callback(self._runtime.stop, actor)
        return actor


def _engines(config: RunConfig) -> EnginesConfig:
    """The engines take what a session may have, unless the recipe says more."""
    context = config.engines.max_context_tokens or config.sampling.max_context_tokens
    return config.engines.model_copy(update={"max_context_tokens": context})


async def _or_none(call: Callable[[], Awaitable[R]]) -> R | None:
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await call()
    except (ActorLost, TimeoutError):
        return None
