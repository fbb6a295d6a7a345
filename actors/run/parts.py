"""The actors that every service is made of, training or not: pool, gateway, engines, evaluator, workers, dispatcher.

Invariants:
- Every actor is named, kept in `_actors` for its guard, and stopped when the service's context ends, the last first.
- Who starts them, and in what order, is the service's: see `service` and `held_out.service`.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import orjson

from headrace.actors.agents.registry import make_agent
from headrace.actors.engine_group.group import EngineGroup
from headrace.actors.errors import DiskFull, first_cause
from headrace.actors.evaluation.evaluator import Evaluator
from headrace.actors.places.gateway import GatewayActor
from headrace.actors.places.sandbox_pool import SandboxPool
from headrace.actors.record.actor_telemetry import ActorTelemetry
from headrace.actors.rollouts.dispatcher import Dispatcher
from headrace.actors.rollouts.evaluation_folders import EvaluationFolders
from headrace.actors.rollouts.stations import SessionTerms, WorkerParts
from headrace.actors.rollouts.summary import About
from headrace.actors.rollouts.worker import RolloutWorker
from headrace.actors.run.supervision import Parts
from headrace.actors.runtime.call_guard import guard
from headrace.actors.runtime.resources import ResourceOwner
from headrace.actors.runtime.retry import until_back
from headrace.actors.simulated.engines import SimulatedEngineGroup
from headrace.policies.engine import PauseMode
from headrace.serve.capture.session import FINAL_TEXT, Budgets, Sampling
from headrace.serve.gateway.gateway import GatewayConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from headrace.actors.engine_group.config import EnginesConfig
    from headrace.actors.record.run_directory import RunDirectory
    from headrace.actors.rollouts.records import RolloutStore
    from headrace.actors.run.config import RunConfig
    from headrace.actors.runtime.runtime import Runtime
    from headrace.actors.training.learner import LearnerLoop

R = TypeVar("R")


class ServiceParts(ResourceOwner):
    """Base of the services: starts the actors that they share."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, runtime: Runtime, *, evaluations: EvaluationFolders
    ) -> None:
        super().__init__()
        self._config = config
        self._directory = directory
        self._runtime = runtime
        self._evaluations = evaluations
        self._observing = ActorTelemetry(config=config.telemetry, run_dir=directory.path, retention=config.retention)
        self._gateway: GatewayActor | None = None
        self._actors: dict[str, object] = {}
        self._failed_to_start = False

    async def process_ids(self) -> dict[str, int]:
        """Process id by actor name; for operators and fault tests."""
        return {name: (await self._runtime.stats(actor))[0] for name, actor in self._actors.items()}

    @asynccontextmanager
    async def _starting(self) -> AsyncIterator[None]:
        """What was started here stops again when the block fails, and what was found alive lives on: it belongs to the
        run, and the next service finds it. The first cause is raised."""
        try:
            yield
        except BaseException as error:
            self._failed_to_start = True
            await self._stack.aclose()
            if isinstance(error, BaseExceptionGroup):
                raise first_cause(error) from error
            raise

    @asynccontextmanager
    async def _guarded(self, supervision: Coroutine[Any, Any, NoReturn]) -> AsyncIterator[asyncio.TaskGroup]:
        """Every actor is guarded, and `supervision` goes on, for as long as the block does. Raises DiskFull when the
        disk is full, whatever that broke, else the first cause."""
        try:
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(guard(self._runtime, name, actor, self._config.service.hang_s))
                    for name, actor in self._actors.items()
                ]
                beside.append(tasks.create_task(supervision))
                yield tasks
                for task in beside:
                    task.cancel()
        except BaseExceptionGroup as group:
            self._refuse_full_disk()
            raise first_cause(group) from group

    async def _start_pool(self) -> None:
        self._pool = await self._spawn("sandbox-pool", SandboxPool, self._config.sandbox, directory=self._directory)

    async def _start_gateway(self) -> None:
        config, directory = self._config, self._directory
        self._gateway = await self._spawn(
            "gateway",
            GatewayActor,
            GatewayConfig(
                tokenizer_dir=config.model.path,
                session_log_dir=directory.path / "sessions",
                in_place_pushes=config.push.pause_mode is PauseMode.IN_PLACE,
                **config.gateway.model_dump(),
            ),
            address_file=directory.path / "gateway.json",
            observing=self._observing,
        )

    async def _start_workers(self, replay: RolloutStore) -> None:
        """Engines and evaluator, then the workers that need both."""
        async with asyncio.TaskGroup() as starting:
            engines = starting.create_task(self._spawn_engines())
            lease_s = self._config.rollout.lease_s
            evaluator = starting.create_task(
                self._spawn("evaluator", Evaluator, self._pool, self._observing, lease_s=lease_s)
            )
        self._engines, self._evaluator = engines.result(), evaluator.result()
        parts = await self._worker_parts(replay, self._evaluator)
        async with asyncio.TaskGroup() as starting:
            workers = [
                starting.create_task(self._spawn(f"worker-{index}", RolloutWorker, parts))
                for index in range(self._config.service.workers)
            ]
        self._workers = [worker.result() for worker in workers]

    async def _spawn_engines(self) -> EngineGroup | SimulatedEngineGroup:
        config = self._config
        if self._gateway is None:
            return await self._spawn(
                "engines",
                SimulatedEngineGroup,
                config.engines.simulated,
                observing=self._observing,
                directory=self._directory,
            )
        return await self._spawn(
            "engines",
            EngineGroup,
            _engines(config),
            config.push,
            gateway=self._gateway,
            model_dir=config.model.path,
            seed=config.service.seed,
            observing=self._observing,
            runtime=self._runtime,
        )

    async def _start_dispatcher(self, replay: RolloutStore) -> None:
        self._dispatcher = await self._spawn(
            "dispatcher",
            Dispatcher,
            self._config.dispatcher,
            replay=replay,
            pool=self._pool,
            workers=self._workers,
            evaluations=self._evaluations,
            engines=self._engines,
        )

    async def _worker_parts(self, replay: RolloutStore, evaluator: Evaluator) -> WorkerParts:
        config = self._config
        training = training_terms(config)
        return WorkerParts(
            pool=self._pool,
            evaluator=evaluator,
            replay=replay,
            agent=make_agent(config.agent),
            gateway=None if self._gateway is None else await until_back(self._gateway.address),
            simulated_engines=cast("SimulatedEngineGroup", self._engines) if config.engines.is_simulated else None,
            sampling=training.sampling,
            budgets=training.budgets,
            evaluation_terms=evaluation_terms(config),
            train_truncated=config.sampling.train_truncated,
            rollout=config.rollout,
            observing=self._observing,
            evaluations=self._evaluations,
        )

    def _refuse_full_disk(self) -> None:
        free_bytes = shutil.disk_usage(self._directory.path).free
        if free_bytes < self._config.service.min_free_bytes:
            raise DiskFull(
                f"the disk of {self._directory.path} has {free_bytes >> 20} MiB left, less than service.min_free_bytes "
                f"({self._config.service.min_free_bytes >> 20} MiB): free some space, then resume the run"
            )

    def _parts(self, learner: LearnerLoop | None = None) -> Parts:
        """What supervision looks at."""
        return Parts(
            learner=learner,
            dispatcher=self._dispatcher,
            pool=self._pool,
            evaluator=self._evaluator,
            gateway=self._gateway,
            engines=None if self._config.engines.is_simulated else cast("EngineGroup", self._engines),
            workers=self._workers,
        )

    async def _spawn(self, name: str, cls: type[R], *args: object, **kwargs: object) -> R:
        actor = await self._runtime.spawn(cls, *args, name=name, **kwargs)
        self._actors[name] = actor
        self._stack.push_async_callback(self._stop, actor)
        return actor

    async def _stop(self, actor: object) -> None:
        if not (self._failed_to_start and self._runtime.found(actor)):
            await self._runtime.stop(actor)


def training_terms(config: RunConfig) -> SessionTerms:
    """Sampling and budgets of training sessions."""
    budgets = Budgets(
        max_turns=config.agent.max_turns,
        max_tokens_per_turn=config.sampling.max_tokens_per_turn,
        max_context_tokens=config.sampling.max_context_tokens,
        max_sampled_tokens=config.sampling.max_sampled_tokens,
        wall_s=config.rollout.agent_timeout_s,
        final_text=FINAL_TEXT if config.agent.is_program else "",
    )
    return SessionTerms(sampling=Sampling(temperature=config.sampling.temperature), budgets=budgets)


def evaluation_terms(config: RunConfig) -> SessionTerms:
    """Sampling and budgets of evaluation sessions: those of training where evaluation.sampling says nothing."""
    training, own = training_terms(config), config.evaluation.sampling
    temperature = training.sampling.temperature if own.temperature is None else own.temperature
    budgets = replace(
        training.budgets,
        max_tokens_per_turn=own.max_tokens_per_turn or training.budgets.max_tokens_per_turn,
        max_context_tokens=own.max_context_tokens or training.budgets.max_context_tokens,
        max_sampled_tokens=own.max_sampled_tokens or training.budgets.max_sampled_tokens,
    )
    return SessionTerms(sampling=Sampling(temperature=temperature, top_p=own.top_p, top_k=own.top_k), budgets=budgets)


def periodic_evaluations(config: RunConfig, directory: RunDirectory) -> EvaluationFolders:
    """Where a run keeps the evaluations it makes while it trains."""
    about = About(
        model=str(config.model.path),
        recipe_sha256=recipe_digest(config),
        sampling=evaluation_terms(config).to_json(),
    )
    return EvaluationFolders(root=directory.path / "evaluations", about=about)


def recipe_digest(config: RunConfig) -> str:
    """SHA-256 over the resolved recipe, hexadecimal; the same wherever the run directory lies."""
    document = config.model_dump(mode="json")
    for key in ("checkpoint_dir", "snapshot_dir"):
        del document["learner"][key]
    return hashlib.sha256(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _engines(config: RunConfig) -> EnginesConfig:
    """The engines take what a session may have, unless the recipe says more."""
    most = max(config.sampling.max_context_tokens, config.evaluation.sampling.max_context_tokens or 0)
    context = config.engines.max_context_tokens or most
    return config.engines.model_copy(update={"max_context_tokens": context})
