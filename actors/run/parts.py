"""Wiring of the actors, shared by runs, evaluations, virtual time and benches.

Invariants:
- Every actor has a name, is listed in `_actors` so that it is guarded, and is stopped when the service's context exits,
  in reverse order.
- A service decides which actors it starts, and in what order: see `service` and `held_out.service`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import orjson

from headrace.actors.agents.registry.registry import make_agent
from headrace.actors.derivation.clocks import gate_wait_s, push_config, weights_bytes
from headrace.actors.derivation.terms import Terms
from headrace.actors.engines.devices import local_gpus
from headrace.actors.engines.group import EngineGroup
from headrace.actors.errors import ActorError, DiskFull
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.record.files.absences import OF_ACTORS, Absences
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.disk_space import WAITING, full_folders, missing_space
from headrace.actors.record.files.housekeeping import EVERY_S, keep_house
from headrace.actors.record.files.metrics import UNRECORDED, MetricsLog
from headrace.actors.record.files.run_directory import RunDirectory, identity_of, read_configuration
from headrace.actors.rollouts.dispatcher import Dispatcher
from headrace.actors.rollouts.evaluation_folders import EvaluationFolders
from headrace.actors.rollouts.records import RolloutStore
from headrace.actors.rollouts.stations import SessionTerms, SourceParts, WorkerParts
from headrace.actors.rollouts.summary import About
from headrace.actors.rollouts.worker import RolloutWorker
from headrace.actors.run.config import RunConfig, slime_terms
from headrace.actors.run.placement import LEARNER_BUNDLE, Unit
from headrace.actors.run.supervision import SupervisedActors, or_none
from headrace.actors.runtime.actors.guarded_actors import GuardedActors
from headrace.actors.runtime.actors.nodes import NodeRole
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime, Resources, Runtime
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup
from headrace.actors.telemetry.page.actor import NOT_SENT, Observer
from headrace.actors.telemetry.spans.limit import keep_spans, make_room
from headrace.actors.telemetry.spans.store import FOLDER
from headrace.actors.training.external_loop import LEARNER, ExternalTrainerLoop
from headrace.actors.training.learner import LearnerLoop
from headrace.actors.training.replay import Replay
from headrace.actors.training.slime_loop import SlimeLoop
from headrace.buffer.core.task_catalog import TaskCatalog
from headrace.buffer.tasks.task import Task
from headrace.policies.engine import PauseMode
from headrace.policies.learners.config import LearnerConfig, row_limits
from headrace.policies.learners.simulated import SimulatedLearnerConfig
from headrace.policies.learners.slime.arguments import SlimeTerms
from headrace.policies.processes.engine_keys import EngineKeyFiles
from headrace.sandboxes.base import SandboxProvider
from headrace.serve.gateway.capture.session import FINAL_TEXT, Budgets, Sampling
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.tracing.telemetry import TelemetryConfig

logger = logging.getLogger(__name__)
OBSERVER_EVERY_S: Final = 5.0
"""Time between two calls of the observer."""
OBSERVER_BACK_S: Final = 20.0
"""Time that the end of a run waits for the last traces: usually at most 3 s, longer if the observer was just killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Externals:
    """Dependencies of a service outside its actors, which virtual time replaces."""

    clock: Callable[[], float] = time.time
    """Unix time, in seconds."""
    provider: SandboxProvider | None = None
    """Provider that boots the sandboxes in place of the configured one."""
    tasks: tuple[Task, ...] = ()
    """Training tasks of a run without a directory."""
    heldout: tuple[Task, ...] = ()
    """Held-out tasks of a run without a directory."""
    metrics: MetricsLog = UNRECORDED
    """Metrics of a run without a directory."""
    check_interval_s: float = 1.0
    """Interval between the supervision's checks, in seconds."""


class RunActors(GuardedActors):
    """The actors of a run or of an evaluation, each started by a method.

    Without a directory, which requires simulated engines and sandboxes, the ledgers of rollouts and sandboxes are in
    memory and nothing is recorded.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory | None,
        runtime: Runtime,
        *,
        evaluations: EvaluationFolders | None,
        tasks: TaskCatalog,
        externals: Externals | None = None,
    ) -> None:
        self._externals = externals or Externals()
        path = None if directory is None else directory.path / OF_ACTORS
        absences = Absences(path, clock=self._externals.clock)
        self._full: dict[str, Path] = {}
        """Folders on full disks."""
        super().__init__(runtime, hang_s=config.service.hang_s, absences=absences)
        self._config = config
        self._directory = directory
        self._evaluations = evaluations
        self._tasks = tasks
        self.observing = ActorTelemetry(
            config=TelemetryConfig(**config.telemetry.model_dump()),
            run_dir=None if directory is None else directory.path,
            run_id="" if directory is None else identity_of(directory),
            retention=config.retention,
        )
        self.gateways: list[GatewayActor] = []
        self._observer: Observer | None = None

    @property
    def _control(self) -> Resources:
        """Resources of an actor on the node that has the run's state."""
        return self._config.cluster.on(NodeRole.CONTROL)

    async def start_observer(self) -> None:
        """Start the observer, if there is anything for it to do. It starts first, so that it ends last."""
        telemetry = self._config.telemetry
        if self._directory is not None and (telemetry.otlp_endpoint or telemetry.page):
            path, resources = self._directory.path, self._control
            self._observer = await self._spawn_beside("observer", Observer, path, telemetry, resources=resources)
            # On a cluster the driver of the run does it, when the files of all nodes have come.
            if telemetry.otlp_endpoint and self._config.cluster.is_local:
                self._stack.push_async_callback(self._finish_observer, self._observer)

    async def _finish_observer(self, observer: Observer) -> None:
        """Have the last traces sent, by a restarted observer if it was killed: all other actors have ended."""
        if self._failed_to_start and self._runtime.found(observer):
            return
        try:
            async with asyncio.timeout(OBSERVER_BACK_S):
                await until_back(observer.finish)
        except (ActorError, TimeoutError):
            assert self._directory is not None
            logger.warning(NOT_SENT, self._directory.path, self._config.telemetry.otlp_endpoint)

    async def keep_house(self) -> None:
        """Delete old files beside the ledger, according to the retention config, until cancelled."""
        while self._directory is not None:
            await asyncio.to_thread(keep_house, self._directory, self._config.retention)
            await asyncio.to_thread(keep_spans, self._directory.path, self._config.telemetry, self._config.retention)
            await asyncio.sleep(EVERY_S)

    async def call_observer(self) -> None:
        """Call the observer regularly until cancelled: a restarted actor begins at its first call."""
        while self._observer is not None:
            await or_none(self._observer.status)
            await asyncio.sleep(OBSERVER_EVERY_S)

    async def start_pool(self) -> None:
        self.pool = await self.spawn(
            "sandbox-pool",
            SandboxPool,
            self._config.sandbox,
            directory=self._directory,
            clock=self._externals.clock,
            provider=self._externals.provider,
            observing=self.observing,
            resources=self._control,
        )

    async def start_replay(self) -> None:
        self.replay = await self.spawn(
            "replay",
            Replay,
            self._config.buffer,
            directory=self._directory,
            seed=self._config.service.seed,
            tasks=self._externals.tasks,
            clock=self._externals.clock,
            limits=row_limits(self._config.learner),
            metrics=self._externals.metrics if self._directory is None else self.observing.metrics(),
            copies=None if self._directory is None else self._directory.shared,
            sources=self._config.mix(),
            resources=self._control,
        )

    async def start_gateways(self) -> None:
        """Reserve the rollout units, and start the gateways of each. Simulated engines need none, because their
        sessions are in the workers."""
        cluster, processes = self._config.cluster, range(self._config.gateway.processes)
        for unit in cluster.units():
            await self._reserve(unit.bundle, cluster.unit_bundle)
        if self._config.engines.is_simulated:
            return
        async with asyncio.TaskGroup() as starting:
            gateways = [
                starting.create_task(self._start_gateway(unit, process))
                for unit in cluster.units()
                for process in processes
            ]
        self.gateways = [gateway.result() for gateway in gateways]

    async def _start_gateway(self, unit: Unit, process: int) -> GatewayActor:
        """Start one of a unit's gateways; the first one's files have no number of the process in their names."""
        config, directory = self._config, self._directory
        assert directory is not None
        suffix = f"{unit.suffix}.{process}" if process else unit.suffix
        return await self.spawn(
            f"gateway{suffix}",
            GatewayActor,
            GatewayConfig(
                tokenizer_dir=config.model.path,
                session_log_dir=directory.path / f"sessions{suffix}",
                engine_keys=EngineKeyFiles(own=directory.engine_key, attached=config.engines.key_file),
                in_place_pushes=config.push.pause_mode is PauseMode.IN_PLACE,
                token_kinds=config.learner.needs_kinds,
                gate_wait_s=gate_wait_s(Terms.of(config)),
                **config.gateway.model_dump(),
            ),
            address_file=directory.path / f"gateway{suffix}.json",
            observing=self.observing,
            resources=unit.resources(config.cluster),
        )

    async def start_workers(self, replay: RolloutStore) -> None:
        """Start engines and evaluators, then the workers that need both."""
        config = self._config
        async with asyncio.TaskGroup() as starting:
            engines = starting.create_task(self._spawn_engines(replay))
            evaluators = [
                starting.create_task(
                    self.spawn(
                        f"evaluator{unit.suffix}",
                        Evaluator,
                        self.pool,
                        self.observing,
                        self._tasks,
                        lease_s=config.rollout.lease_s,
                        resources=unit.resources(config.cluster),
                    )
                )
                for unit in config.cluster.units()
            ]
        self.engines, self.evaluators = engines.result(), [evaluator.result() for evaluator in evaluators]
        async with asyncio.TaskGroup() as starting:
            workers = [
                starting.create_task(
                    self.spawn(
                        f"worker-{unit.number * config.service.workers + index}",
                        RolloutWorker,
                        self._worker_parts(replay, unit),
                        resources=unit.resources(config.cluster),
                    )
                )
                for unit in config.cluster.units()
                for index in range(config.service.workers)
            ]
        self.workers = [worker.result() for worker in workers]

    async def _spawn_engines(self, replay: RolloutStore) -> EngineGroup | SimulatedEngineGroup:
        config = self._config
        if config.engines.is_simulated:
            return await self.spawn(
                "engines",
                SimulatedEngineGroup,
                config.engines.simulated,
                metrics=replay,
                directory=self._directory,
                resources=self._control,
            )
        assert self._directory is not None
        terms = Terms.of(config)
        return await self.spawn(
            "engines",
            EngineGroup,
            config.engines.model_copy(update={"max_context_tokens": config.engine_context}),
            push_config(terms, weights_bytes(terms)),
            gateways=self.gateways,
            metrics=replay,
            model_dir=config.model.path,
            seed=config.service.seed,
            observing=self.observing,
            runtime=self._runtime,
            snapshots=(self._directory.weights, self._directory.checkpoints),
            shared=self._directory.storage / "engines",
            learner=self._runtime.named(LEARNER) if isinstance(self._runtime, RayRuntime) else None,
            resources=replace(self._control, gpus=local_gpus(config.engines, config.push)),
        )

    async def start_dispatcher(self, replay: RolloutStore) -> None:
        self.dispatcher = await self.spawn(
            "dispatcher",
            Dispatcher,
            self._config.dispatcher,
            replay=replay,
            pool=self.pool,
            workers=self.workers,
            evaluations=self._evaluations,
            engines=self.engines,
            sources=tuple(source.name for source in self._config.tasks.sources),
            observing=self.observing,
            resources=self._control,
        )

    async def start_learner(self) -> None:
        learner: LearnerConfig | SlimeTerms | SimulatedLearnerConfig = self._config.learner
        if self._config.learner.kind == "slime":
            learner = slime_terms(self._config)
        elif self._config.learner.kind == "simulated":
            weights = None if self._config.engines.is_simulated else self._config.model.path
            # A run without a directory has no checkpoints.
            changes = {
                "checkpoint_dir": None if self._directory is None else self._config.learner.checkpoint_dir,
                "seed": self._config.learner.seed,
                "weights": weights,
            }
            learner = self._config.learner.simulated.model_copy(update=changes)
        recorded = None if self._directory is None else await asyncio.to_thread(read_configuration, self._directory)
        cluster = self._config.cluster
        await self._reserve(LEARNER_BUNDLE, cluster.learner_bundle(self._config.learner))
        self.learner = await self.spawn(
            LEARNER,
            {"external": ExternalTrainerLoop, "slime": SlimeLoop}.get(self._config.learner.kind, LearnerLoop),
            self._config.training,
            learner,
            replay=self.replay,
            engines=self.engines,
            observing=self.observing,
            configuration=recorded,
            resources=cluster.in_bundle(LEARNER_BUNDLE, gpus=self._config.learner.gpus),
        )

    def _worker_parts(self, replay: RolloutStore, unit: Unit) -> WorkerParts:
        config = self._config
        first = unit.number * config.gateway.processes
        return WorkerParts(
            pool=self.pool,
            evaluator=self.evaluators[unit.number],
            replay=replay,
            sources={name: source_parts(own) for name, own in config.by_source().items()},
            tasks=self._tasks,
            gateways=tuple(self.gateways[first : first + config.gateway.processes]),
            simulated_engines=cast("SimulatedEngineGroup", self.engines) if config.engines.is_simulated else None,
            lease_s=config.rollout.lease_s,
            observing=self.observing,
            evaluations=self._evaluations,
            services=config.services,
        )

    def refuse_full_disk(self) -> None:
        if self._directory is None:
            return
        wanted = self._config.service.min_free_bytes
        if (free_bytes := shutil.disk_usage(self._directory.path).free) < wanted:
            with suppress(OSError):
                make_room(self._directory.path / FOLDER, wanted - free_bytes)
        full = full_folders(self._directory, wanted, shared=False)
        if "state" in full:
            raise DiskFull(missing_space(full, wanted))
        # Those end the run only if something fails because of them.
        for name, folder in (self._full | full).items():
            change = self.absences.lost if name in full else self.absences.back
            change(f"space on the disk of {folder} ({name}: {WAITING[name]})")
        self._full = full


def supervised_actors(actors: RunActors, learner: LearnerLoop | None = None) -> SupervisedActors:
    """Return the actors that supervision checks; an evaluation has no learner."""
    return SupervisedActors(
        learner=learner,
        dispatcher=actors.dispatcher,
        pool=actors.pool,
        evaluators=actors.evaluators,
        gateways=actors.gateways,
        # Simulated engines have no gateway, and no state to report.
        engines=cast("EngineGroup", actors.engines) if actors.gateways else None,
        workers=actors.workers,
    )


def source_parts(config: RunConfig) -> SourceParts:
    """Return what the rollouts of a source run with, given its configuration. Raises ConfigError."""
    training = training_terms(config)
    return SourceParts(
        agent=make_agent(config.agent, config.environment),
        sampling=training.sampling,
        budgets=training.budgets,
        evaluation_terms=evaluation_terms(config),
        train_truncated=config.sampling.train_truncated,
        train_cut=config.sampling.train_cut,
        train=config.sampling.train,
        serve_unhonoured=config.sampling.serve_unhonoured,
        rollout=config.rollout,
    )


def training_terms(config: RunConfig) -> SessionTerms:
    """Return the sampling settings and budgets of training sessions."""
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
    """Return the sampling settings and budgets of evaluation sessions: those of training where evaluation.sampling sets
    none."""
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
    """Return the folders for a run's evaluations."""
    about = About(
        model=str(config.model.path),
        recipe_sha256=recipe_digest(config),
        sampling=evaluation_sampling(config),
    )
    return EvaluationFolders(root=directory.evaluations, about=about)


def evaluation_sampling(config: RunConfig) -> dict[str, float | int | None]:
    """Return the terms of evaluation sessions as an evaluation's summary has them; those of a source come after its
    name."""
    return {
        f"{name}.{key}" if name else key: value
        for name, own in config.by_source().items()
        for key, value in evaluation_terms(own).to_json().items()
    }


def recipe_digest(config: RunConfig) -> str:
    """Return the hexadecimal SHA-256 of the resolved recipe, which does not depend on the run directory's path."""
    document = config.model_dump(mode="json")
    for key in ("checkpoint_dir", "snapshot_dir"):
        del document["learner"][key]
    if not config.tasks.sources:
        # The digest of a recipe without sources is that of versions that had none.
        del document["tasks"]["sources"]
    # The name of its file does not define it.
    del document["telemetry"]["recipe"]
    # Which file a secret is in does not define a run.
    del document["engines"]["key_file"]
    # Nor does the place of a service: one that the run starts has another address each time.
    for service in document["services"].values():
        for key in ("key_file", "url", "corpus", "path"):
            del service[key]
    return hashlib.sha256(orjson.dumps(document, option=orjson.OPT_SORT_KEYS)).hexdigest()
