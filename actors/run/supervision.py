"""Supervision of all of a run's actors: station utilisation, rollout pacing and hung learners.

Invariants:
- An actor that does not answer in time is missing from the snapshot; a check never waits beyond `STATUS_TIMEOUT_S`.
- A learner that answers but does not finish a step, a save or an opening in time is killed. Its successor resumes from
  the last checkpoint; if that does not help, the stall detector ends the run.
- The measurements are written to the metrics every `RECORD_S`, so that a report can name the bottleneck.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from headrace.actors.engines.gate import stats_of
from headrace.actors.engines.group import EngineGroup
from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.errors import ActorLost
from headrace.actors.evaluation.graders.evaluator import Evaluator
from headrace.actors.record.files.metrics import MetricsWriter, ServicesMetric, StationMeans, StationsMetric
from headrace.actors.record.files.utilisation import SERVICE, Station, StationLoad, UtilisationMeter, bottleneck
from headrace.actors.rollouts.dispatcher import Dispatcher, DispatcherStatus
from headrace.actors.rollouts.pacing import LatencyWatch, Pressure
from headrace.actors.rollouts.worker import RolloutWorker, WorkerStatus
from headrace.actors.run.config import RunConfig
from headrace.actors.run.progress import Progress
from headrace.actors.runtime.actors.call_guard import AwakeClock
from headrace.actors.runtime.actors.recording import record
from headrace.actors.runtime.actors.runtime import Runtime
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.actors.runtime.pools.sandbox_pool import SandboxPool
from headrace.actors.services.figures import FiguresSum, ServiceFigures
from headrace.actors.training.learner import ENDING_STAGES, LearnerLoop, LearnerStatus, Stage
from headrace.actors.training.replay import Replay, parked_line
from headrace.buffer.core.replay import BufferStatus, SourceStatus
from headrace.sandboxes.pool.pool import PoolStatus
from headrace.serve.gateway.http.gateway import GatewayStats

R = TypeVar("R")

STATUS_TIMEOUT_S = 5.0
"""Time limit for an actor to report its status; after that, the status is None."""
RECORD_S = 10.0
"""Interval between two metrics records of the stations."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedActors:
    """Actors to check. An evaluation has no learner; simulated engines have neither gateways nor a startup phase."""

    learner: LearnerLoop | None
    dispatcher: Dispatcher
    pool: SandboxPool
    evaluators: Sequence[Evaluator]
    gateways: Sequence[GatewayActor] = ()
    engines: EngineGroup | None = None
    workers: Sequence[RolloutWorker]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusSnapshot:
    """Status of every actor at one moment; None for an actor that did not answer."""

    learner: LearnerStatus | None
    dispatcher: DispatcherStatus | None
    pool: PoolStatus | None
    gateway: GatewayStats | None
    workers: tuple[WorkerStatus | None, ...]
    judged_steps: int | None
    engines: tuple[EngineStatus, ...]

    def in_use(self) -> dict[str, float]:
        """Return the number of rollouts in each station whose actors have answered."""
        found: dict[str, float] = {}
        if self.pool is not None:
            found[Station.QUEUE] = self.pool.waiting
            found[Station.BOOT] = self.pool.booting
            found[Station.SANDBOX] = self.pool.booting + self.pool.live
        if self.gateway is not None:
            found[Station.ENGINE] = sum(self.gateway.turns_in_flight.values())
        if all(worker is not None for worker in self.workers):
            phases = [worker.phases for worker in self.workers if worker is not None]
            found[Station.EVALUATOR] = sum(phase.get("evaluate", 0) for phase in phases)
            turns = [worker.turns for worker in self.workers if worker is not None and worker.turns is not None]
            if turns:
                found[Station.ENGINE] = sum(turns)
            if any("simulator" in phase for phase in phases):
                found[Station.SIMULATOR] = sum(phase.get("simulator", 0) for phase in phases)
            for name, figures in self.services():
                station = f"{SERVICE}{name}"
                found[station] = found.get(station, 0) + figures.in_flight + figures.waiting
        if self.learner is not None:
            is_idle = self.learner.stage in (Stage.WAITING, Stage.ABSENT)
            found[Station.LEARNER] = 0.0 if is_idle else 1.0
        return found

    def services(self) -> Iterator[tuple[str, ServiceFigures]]:
        """Yield the name and the figures of each service of each worker that has answered."""
        for worker in self.workers:
            if worker is not None:
                yield from worker.services.items()


async def snapshot_of(actors: SupervisedActors) -> StatusSnapshot:
    """Query all actors concurrently."""
    async with asyncio.TaskGroup() as asking:
        learner = asking.create_task(or_none(None if actors.learner is None else actors.learner.status))
        dispatcher = asking.create_task(or_none(actors.dispatcher.status))
        pool = asking.create_task(or_none(actors.pool.status))
        gateway = asking.create_task(or_none(partial(stats_of, actors.gateways) if actors.gateways else None))
        judged_steps = [asking.create_task(or_none(evaluator.judged_steps)) for evaluator in actors.evaluators]
        engines = asking.create_task(or_none(None if actors.engines is None else actors.engines.status))
        workers = [asking.create_task(or_none(worker.status)) for worker in actors.workers]
    return StatusSnapshot(
        learner=learner.result(),
        dispatcher=dispatcher.result(),
        pool=pool.result(),
        gateway=gateway.result(),
        workers=tuple(worker.result() for worker in workers),
        judged_steps=_sum_of([judged.result() for judged in judged_steps]),
        engines=tuple(engines.result() or ()),
    )


def _sum_of(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


class Supervision:
    """Supervision of one service, which calls `check` every `interval_s` seconds, and `finish` at its end."""

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        metrics: MetricsWriter,
        actors: SupervisedActors,
        *,
        interval_s: float = 1.0,
    ) -> None:
        self._config, self._runtime, self._metrics, self._actors = config, runtime, metrics, actors
        self._meter, self._latencies = UtilisationMeter(), LatencyWatch()
        self._oldest: list[str] = []
        self._service_totals = FiguresSum()
        self._measuring = asyncio.Lock()
        self.loads: tuple[StationLoad, ...] = ()
        """Loads over the last full recording interval."""
        self.held_up_by: StationLoad | None = None
        self.clock = AwakeClock(2 * STATUS_TIMEOUT_S + interval_s)

    async def check(self) -> StatusSnapshot:
        """Query all actors, record the stations' loads, kill a hung learner and pace the dispatcher."""
        self.clock.read(asyncio.get_running_loop().time())
        status = await snapshot_of(self._actors)
        await self._measure(status, RECORD_S)
        if (learner := status.learner) is not None and learner.stage in ENDING_STAGES:
            stage_s, allowed_s = learner.stage_s, self._config.training.stage_timeout_s
            if stage_s - self.clock.paused_within(stage_s) > allowed_s:
                logger.error(
                    "killing the learner: stage %s has taken longer than training.stage_timeout_s (%.0f s)",
                    learner.stage.value,
                    stage_s,
                )
                await self._runtime.restart(self._actors.learner, learner.process_id)
        if self._config.dispatcher.pacing:
            # Simulated engines have no queue, because they accept every turn immediately.
            turns = None if status.gateway is None else status.in_use().get(Station.ENGINE)
            queue = None if turns is None else turns / _engine_places(self._config)
            pressure = Pressure(engine_queue=queue, latencies_s=self._latencies.latencies_s)
            await or_none(lambda: self._actors.dispatcher.pace(pressure))
        return status

    async def finish(self) -> None:
        """Query all actors once more, and record what was measured since the last record."""
        await self._measure(await snapshot_of(self._actors), 0.0)

    def diagnosis(self) -> str:
        """Describe the stations' loads, and each worker's oldest rollout."""
        loads = "; ".join(load.line() for load in self.loads) or "stations not measured yet"
        held_up = [] if self.held_up_by is None else [f"held up by {self.held_up_by.station}"]
        return "; ".join([loads, *held_up, *(f"oldest: {oldest}" for oldest in self._oldest)])

    async def _measure(self, status: StatusSnapshot, period_s: float) -> None:
        """Sample the stations, and record their loads and the services' figures if the period is over."""
        if status.dispatcher is None:
            return
        async with self._measuring:
            await self._sample_and_record(status, status.dispatcher, period_s)

    async def _sample_and_record(self, status: StatusSnapshot, dispatcher: DispatcherStatus, period_s: float) -> None:
        # Evaluation rollouts use the stations like all others.
        in_flight = dispatcher.in_flight + dispatcher.evaluating
        ended = dispatcher.finished + dispatcher.answered
        now_s, in_use = asyncio.get_running_loop().time(), status.in_use()
        self._latencies.sample(now_s, in_use, ended)
        self._meter.sample(now_s, in_use, ended, in_flight=in_flight)
        self._oldest = [worker.oldest for worker in status.workers if worker is not None and worker.oldest]
        for worker in status.workers:
            if worker is not None:
                self._service_totals.add(worker.incarnation, worker.services)
        if not self._meter.seconds or self._meter.seconds < period_s:
            return
        sizes = dict(capacities(self._config, status.pool))
        for name, figures in status.services():
            sizes[f"{SERVICE}{name}"] = sizes.get(f"{SERVICE}{name}", 0.0) + figures.limit
        self.loads = self._meter.loads(sizes)
        self.held_up_by = bottleneck(self.loads, self._meter.in_flight)
        means = StationsMetric(
            seconds=self._meter.seconds,
            in_flight=self._meter.in_flight,
            held_up_by=None if self.held_up_by is None else str(self.held_up_by.station),
            stations={
                str(load.station): StationMeans(in_use=load.in_use, capacity=load.capacity, mean_s=load.mean_s)
                for load in self.loads
            },
        )
        if self._config.dispatcher.pacing:
            pacing: dict[str, int | str] = {
                "rollout_limit": dispatcher.limit,
                "slowed_by": dispatcher.slowed_by,
            }
            means = replace(means, pacing=pacing)
        await record(self._metrics, means, deadline_s=STATUS_TIMEOUT_S)
        if totals := self._service_totals.take():
            services = ServicesMetric(seconds=self._meter.seconds, services=totals)
            await record(self._metrics, services, deadline_s=STATUS_TIMEOUT_S)
        self._meter.reset()


def capacities(config: RunConfig, pool: PoolStatus | None) -> Mapping[str, float]:
    """Return the capacity of each station that has one, apart from services, whose limits adapt."""
    hosts = max(1, len(pool.hosts)) if pool is not None else 1
    sizes: dict[str, float] = {
        Station.BOOT: config.sandbox.pool.boot_concurrency * hosts,
        Station.SANDBOX: config.sandbox.pool.max_live * hosts,
        Station.LEARNER: 1.0,
    }
    return sizes if config.engines.is_simulated else sizes | {Station.ENGINE: _engine_places(config)}


def _engine_places(config: RunConfig) -> int:
    return config.engines.at_least * config.engines.max_running


async def or_none(call: Callable[[], Awaitable[R]] | None) -> R | None:
    """Return the result of `call`, or None when the actor is lost or slow, or this run has no such actor."""
    if call is None:
        return None
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await call()
    except (ActorLost, TimeoutError):
        return None


def diagnosis_of(progress: Progress, stored: BufferStatus | None, supervision: Supervision) -> str:
    """Describe the state of a run that is stalled; `stored` is None for a buffer that does not answer."""
    rollouts = f"{progress.rollouts_in_flight} rollouts in flight, {progress.sandboxes} sandboxes"
    parts = [f"phase {progress.phase}, step {progress.step}, {rollouts}, {supervision.diagnosis()}"]
    parts += [f"absent: {', '.join(progress.absent)}"] if progress.absent else []
    if stored is None:
        parts.append("the buffer is not responding")
    else:
        held = ", ".join(f"{count} {state}" for state, count in stored.rollouts.items() if count) or "nothing"
        parts.append(f"the buffer holds {held} and admits {stored.admit}")
        parts += [f"orders are held: {stored.held}"] if stored.held else []
        parts += [line for name, source in stored.sources.items() if (line := source_line(name, source))]
        suspects = [f"host {host} receives only probes: {reason}" for host, reason in stored.suspects.items()]
        parts += [", ".join(suspects), parked_line(stored.parked)]
    return "; ".join(part for part in parts if part)


def failing_line(stored: BufferStatus | None) -> str:
    """Name the sources of tasks whose attempts mostly fail; empty if there are none."""
    sources = {} if stored is None else stored.sources
    return "; ".join(f"source {name}: {source.failing}" for name, source in sources.items() if source.failing)


def source_line(name: str, source: SourceStatus) -> str:
    """Describe a source of tasks that the next batch waits for; empty if it does not wait for this one."""
    if not source.lacking:
        return ""
    failing = f"; it gets one probe a minute: {source.failing}" if source.failing else ""
    return (
        f"the next batch lacks {source.lacking} rollouts of source {name}, of which {source.in_flight} are in flight"
        f"{failing}"
    )


async def readiness_of(actors: SupervisedActors, replay: Replay, config: RunConfig) -> dict[str, Any]:
    """Return whether the run can make progress now, as the fields of `runs.contract.Readiness`."""
    stored, learner, serving = await asyncio.gather(
        or_none(replay.status),
        or_none(None if actors.learner is None else actors.learner.status),
        or_none(None if actors.engines is None else partial(actors.engines.serving, unlike=False, timeout_s=0.0)),
    )
    limit_s = config.training.stage_timeout_s
    in_time = learner is not None and (learner.stage not in ENDING_STAGES or learner.stage_s <= limit_s)
    checks = {
        "ledger_writable": (stored is not None, "the replay buffer, which writes the ledger, does not answer"),
        # Simulated engines always serve.
        "engine_serving": (actors.engines is None or bool(serving), "no engine serves the newest weights"),
        "learner_in_time": (in_time, f"the learner does not answer, or a stage takes longer than {limit_s:g} s"),
    }
    problems = tuple(problem for passed, problem in checks.values() if not passed)
    return {name: passed for name, (passed, _) in checks.items()} | {"problems": problems}
