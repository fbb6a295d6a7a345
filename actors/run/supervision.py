"""One look a second at all parts of a run: how busy each station is, what is overloaded, what hangs.

Invariants:
- A part that does not answer in time is left out of the look; a look never waits longer than `STATUS_TIMEOUT_S`.
- A learner that answers and gets nowhere with a step, a save or an opening is killed: its successor goes on from the
  last checkpoint, and the stall detector ends the run when that helps nothing.
- What was measured goes to the metrics every `RECORD_S`, so that a report can say which station held the run up.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from headrace.actors.errors import ActorLost
from headrace.actors.record.metrics import StationMeans, StationsMetric
from headrace.actors.record.utilisation import Station, UtilisationMeter, bottleneck
from headrace.actors.rollouts.pacing import LatencyWatch, Pressure
from headrace.actors.runtime.call_guard import AwakeClock
from headrace.actors.training.learner import ENDING_STAGES, Stage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from headrace.actors.engine_group.group import EngineGroup
    from headrace.actors.engine_group.members_file import EngineStatus
    from headrace.actors.evaluation.evaluator import Evaluator
    from headrace.actors.places.gateway import GatewayActor
    from headrace.actors.places.sandbox_pool import SandboxPool
    from headrace.actors.record.metrics import MetricsLog
    from headrace.actors.record.utilisation import StationLoad
    from headrace.actors.rollouts.dispatcher import Dispatcher, DispatcherStatus
    from headrace.actors.rollouts.worker import RolloutWorker, WorkerStatus
    from headrace.actors.run.config import RunConfig
    from headrace.actors.runtime.runtime import Runtime
    from headrace.actors.training.learner import LearnerLoop, LearnerStatus
    from headrace.sandboxes.pool.pool import PoolStatus
    from headrace.serve.gateway.gateway import GatewayStats

R = TypeVar("R")

STATUS_TIMEOUT_S = 5.0
"""A part that tells nothing for so long is shown without a value."""
RECORD_S = 10.0
"""Between two records of the stations."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What is looked at. An evaluation has no learner; simulated engines have no gateway, and no start."""

    learner: LearnerLoop | None
    dispatcher: Dispatcher
    pool: SandboxPool
    evaluator: Evaluator
    gateway: GatewayActor | None = None
    engines: EngineGroup | None = None
    workers: Sequence[RolloutWorker]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What each part said; None for one that did not answer."""

    learner: LearnerStatus | None
    dispatcher: DispatcherStatus | None
    pool: PoolStatus | None
    gateway: GatewayStats | None
    workers: tuple[WorkerStatus | None, ...]
    judged_steps: int | None
    engines: tuple[EngineStatus, ...]

    def in_use(self) -> dict[Station, float]:
        """How many are in each station, of those that answered."""
        found: dict[Station, float] = {}
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
        if self.learner is not None:
            found[Station.LEARNER] = 0.0 if self.learner.stage is Stage.WAITING else 1.0
        return found


async def look_at(parts: Parts) -> Look:
    """Ask every part."""
    async with asyncio.TaskGroup() as asking:
        learner = asking.create_task(or_none(None if parts.learner is None else parts.learner.status))
        dispatcher = asking.create_task(or_none(parts.dispatcher.status))
        pool = asking.create_task(or_none(parts.pool.status))
        gateway = asking.create_task(or_none(None if parts.gateway is None else parts.gateway.stats))
        judged_steps = asking.create_task(or_none(parts.evaluator.judged_steps))
        engines = asking.create_task(or_none(None if parts.engines is None else parts.engines.status))
        workers = [asking.create_task(or_none(worker.status)) for worker in parts.workers]
    return Look(
        learner=learner.result(),
        dispatcher=dispatcher.result(),
        pool=pool.result(),
        gateway=gateway.result(),
        workers=tuple(worker.result() for worker in workers),
        judged_steps=judged_steps.result(),
        engines=tuple(engines.result() or ()),
    )


class Supervision:
    """Supervision of one service, which calls `look` every `look_s` seconds."""

    def __init__(
        self, config: RunConfig, runtime: Runtime, metrics: MetricsLog, parts: Parts, *, look_s: float = 1.0
    ) -> None:
        self._config, self._runtime, self._metrics, self._parts = config, runtime, metrics, parts
        self._meter, self._latencies = UtilisationMeter(), LatencyWatch()
        self.loads: tuple[StationLoad, ...] = ()
        """Over the last full stretch."""
        self.held_up_by: StationLoad | None = None
        self.clock = AwakeClock(2 * STATUS_TIMEOUT_S + look_s)

    async def look(self) -> Look:
        """Ask every part, keep what it says, and act on it."""
        self.clock.read(asyncio.get_running_loop().time())
        look = await look_at(self._parts)
        self._measure(look)
        await self._end_hung(look.learner)
        await self._pace(look)
        return look

    def diagnosis(self) -> str:
        """The stations in words."""
        told = "; ".join(load.line() for load in self.loads) or "stations not measured yet"
        return told if self.held_up_by is None else f"{told}; held up by {self.held_up_by.station}"

    def _measure(self, look: Look) -> None:
        if look.dispatcher is None:
            return
        # Evaluations are in the stations like all other rollouts.
        in_flight = look.dispatcher.in_flight + look.dispatcher.evaluating
        ended = look.dispatcher.finished + look.dispatcher.answered
        now_s, in_use = asyncio.get_running_loop().time(), look.in_use()
        self._latencies.sample(now_s, in_use, ended)
        self._meter.sample(now_s, in_use, ended, in_flight=in_flight)
        if self._meter.seconds < RECORD_S:
            return
        self.loads = self._meter.loads(capacities(self._config, look.pool))
        self.held_up_by = bottleneck(self.loads, self._meter.in_flight)
        record = record_of(self.loads, self.held_up_by, self._meter)
        if self._config.dispatcher.pacing.enabled:
            pacing: dict[str, int | str] = {
                "rollout_limit": look.dispatcher.limit,
                "slowed_by": look.dispatcher.slowed_by,
            }
            record = replace(record, pacing=pacing)
        self._metrics.append(record)
        self._meter.reset()

    async def _end_hung(self, learner: LearnerStatus | None) -> None:
        if learner is None or learner.stage not in ENDING_STAGES:
            return
        if learner.stage_s - self.clock.paused_within(learner.stage_s) > self._config.training.stage_timeout_s:
            logger.error("the learner is %s for %.0f s (training.stage_timeout_s) and is killed", *_stage(learner))
            await self._runtime.restart(self._parts.learner, learner.process_id)

    async def _pace(self, look: Look) -> None:
        """Tell the dispatcher how loaded engines and services are."""
        if not self._config.dispatcher.pacing.enabled:
            return
        # Simulated engines have no queue: they take every turn at once.
        turns = None if look.gateway is None else look.in_use().get(Station.ENGINE)
        queue = None if turns is None else turns / _engine_places(self._config)
        pressure = Pressure(engine_queue=queue, latencies_s=self._latencies.latencies_s)
        await or_none(lambda: self._parts.dispatcher.pace(pressure))


def capacities(config: RunConfig, pool: PoolStatus | None) -> Mapping[Station, float]:
    """How many each station takes; those without an entry have no size."""
    hosts = max(1, len(pool.hosts)) if pool is not None else 1
    sizes = {
        Station.BOOT: config.sandbox.pool.boot_concurrency * hosts,
        Station.SANDBOX: config.sandbox.pool.max_live * hosts,
        Station.LEARNER: 1.0,
    }
    return sizes if config.engines.is_simulated else sizes | {Station.ENGINE: _engine_places(config)}


def record_of(loads: Sequence[StationLoad], held_up_by: StationLoad | None, meter: UtilisationMeter) -> StationsMetric:
    """Return the metrics record of what the meter has measured."""
    return StationsMetric(
        seconds=meter.seconds,
        in_flight=meter.in_flight,
        held_up_by=None if held_up_by is None else held_up_by.station.value,
        stations={
            load.station.value: StationMeans(in_use=load.in_use, capacity=load.capacity, mean_s=load.mean_s)
            for load in loads
        },
    )


def _engine_places(config: RunConfig) -> int:
    return config.engines.at_least * config.engines.max_running


def _stage(learner: LearnerStatus) -> tuple[str, float]:
    return learner.stage.value, learner.stage_s


async def or_none(call: Callable[[], Awaitable[R]] | None) -> R | None:
    """What a part says; None when it is lost or slow, or when this run has no such part."""
    if call is None:
        return None
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S):
            return await call()
    except (ActorLost, TimeoutError):
        return None
