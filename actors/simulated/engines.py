"""The simulated engines of a run: one actor that is pushed to, and what each worker process knows of it.

Invariants:
- One push at a time; a snapshot of an earlier epoch than the newest one is not served.
- A worker learns of changes by one waiting call, never by a call per turn, and within that call's way.
- With a directory, what is served is journalled: an actor that starts again goes on with it.
- A drain waits for every worker that is heard of; one that is silent for `FORGOTTEN_S` holds up nobody.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Self

import orjson

from headrace.actors.errors import ActorGone
from headrace.actors.record.metrics import SimulatedPushMetric
from headrace.actors.runtime.operations import until_back
from headrace.actors.runtime.resources import ResourceOwner
from headrace.buffer.primitives.durable_files import write_private
from headrace.buffer.versions import PolicyVersion
from headrace.policies.learners.simulated import PushMode, Served, SimulatedEngine

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.actors.record.actor_telemetry import ActorTelemetry
    from headrace.actors.record.run_directory import RunDirectory
    from headrace.policies.learner import WeightsSnapshot
    from headrace.policies.learners.simulated import SimulatedEnginesConfig

logger = logging.getLogger(__name__)

WATCH_S: Final = 10.0
"""How long one waiting call lasts."""
FORGOTTEN_S: Final = 30.0
"""A worker that did not call for so long is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What one worker says of itself. `rollouts` are sessions that are open, `generated_s` is the time of all turns so
    far."""

    worker: str
    rollouts: int
    generated_s: float
    sessions: int
    """All that ended so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEnginesStatus:
    served: Served
    loads: tuple[WorkerLoad, ...]
    pushes: int


class SimulatedEngineGroup:
    """Stands where the engine group stands; serves what it is pushed."""

    def __init__(
        self, config: SimulatedEnginesConfig, *, observing: ActorTelemetry, directory: RunDirectory | None = None
    ) -> None:
        self._config = config
        self._metrics = observing.metrics()
        self._journal = None if directory is None else directory.path / "served.json"
        self._served = Served(gate_wait_s=config.gate_wait_s)
        self._changed = asyncio.Event()
        self._pushing = asyncio.Lock()
        self._loads: dict[str, WorkerLoad] = {}
        self._heard_s: dict[str, float] = {}
        self._idle: set[str] = set()
        self._has_drained = asyncio.Event()
        self._pushes = 0

    async def __aenter__(self) -> Self:
        if self._journal is not None and self._journal.exists():
            self._served = replace(_read_served(self._journal), gate_wait_s=self._config.gate_wait_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    async def push(self, snapshot: WeightsSnapshot, *, rollouts_in_flight: int) -> None:
        """Serve this version, after the time and in the mode of the config."""
        async with self._pushing:
            newest = self._served.version
            if newest is not None and snapshot.version.epoch < newest.epoch:
                return
            began_s = asyncio.get_running_loop().time()
            if self._config.push is PushMode.DRAIN and newest is not None:
                self._serve(admitting=False)
                await self._drained()
            self._serve(generating=self._config.push is not PushMode.PAUSE)
            await asyncio.sleep(self._config.push_s)
            self._serve(version=snapshot.version, generating=True, admitting=True)
            self._pushes += 1
            total_s = asyncio.get_running_loop().time() - began_s
            record = SimulatedPushMetric(
                version=str(snapshot.version), total_s=total_s, rollouts_in_flight=rollouts_in_flight
            )
            self._metrics.append(record)

    async def served_version(self) -> PolicyVersion | None:
        """As `EngineGroup.served_version`."""
        async with self._pushing:
            return self._served.version

    async def watch(self, load: WorkerLoad, *, after: int) -> Served:
        """What is served, as soon as its number is above `after`, or after `WATCH_S`."""
        self._hear(load)
        if self._served.number < after:
            # The journal of the group before this one was lost: the worker would take nothing with a lower number.
            self._served = replace(self._served, number=after)
            self._serve()
        if self._served.number <= after:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._changed.wait()
        self._heard_s[load.worker] = asyncio.get_running_loop().time()
        return self._served

    async def idle(self, load: WorkerLoad, number: int) -> None:
        """This worker knows change `number`, and nothing runs in it."""
        self._hear(load)
        if number == self._served.number:
            self._idle.add(load.worker)
            self._has_drained.set()

    async def serving(self, *, unlike: bool, timeout_s: float) -> bool:
        """Whether turns can begin, as soon as that is not `unlike`, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._served.reachable is unlike:
                    await self._changed.wait()
        return self._served.reachable

    async def go_down(self) -> None:
        """From now on no turn begins; who waits too long fails."""
        self._serve(reachable=False)

    async def come_back(self) -> None:
        self._serve(reachable=True)

    async def status(self) -> SimulatedEnginesStatus:
        return SimulatedEnginesStatus(served=self._served, loads=tuple(self._loads.values()), pushes=self._pushes)

    def _hear(self, load: WorkerLoad) -> None:
        self._loads[load.worker] = load
        self._heard_s[load.worker] = asyncio.get_running_loop().time()

    def _serve(self, **changes: object) -> None:
        self._served = replace(self._served, number=self._served.number + 1, **changes)  # type: ignore[arg-type]
        if self._journal is not None:
            version = None if self._served.version is None else str(self._served.version)
            write_private(self._journal, orjson.dumps({"number": self._served.number, "version": version}))
        self._idle.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _drained(self) -> None:
        """Wait until every worker that lives has said that nothing runs in it."""
        while not self._living() <= self._idle:
            self._has_drained.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._has_drained.wait()

    def _living(self) -> set[str]:
        now = asyncio.get_running_loop().time()
        return {worker for worker, heard_s in self._heard_s.items() if now - heard_s <= FORGOTTEN_S}


def _read_served(journal: Path) -> Served:
    """What an earlier actor served. A damaged journal says nothing: the engines wait for the next push."""
    try:
        known = orjson.loads(journal.read_bytes())
        # What was under way is not known: the engines generate on, with what they had.
        version = PolicyVersion.parse(known["version"]) if known["version"] else None
        return Served(number=known["number"] + 1, version=version)
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("%s is damaged (%r): the engines wait for the next push", journal, error)
        return Served()


class EngineWatch(ResourceOwner):
    """The engines as one worker process sees them; an async context manager."""

    def __init__(self, group: SimulatedEngineGroup, worker: str) -> None:
        super().__init__()
        self._group = group
        self._worker = worker
        self.engine = SimulatedEngine()
        self._rollouts = 0
        self._sessions = 0

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.callback(self._tasks.create_task(self._watch()).cancel)
        return self

    async def begin(self) -> None:
        """A rollout begins, as soon as one may."""
        await self.engine.admitted()
        self._rollouts += 1

    async def end(self) -> None:
        """A rollout that began has ended."""
        self._rollouts -= 1
        self._sessions += 1
        await self._tell_if_idle()

    async def _watch(self) -> None:
        """Hear of changes until cancelled, however long the actor is away: who watched no more would never hear that
        it came back, and its rollouts would wait for ever."""
        while True:
            after = self.engine.served.number
            try:
                self.engine.set_served(await until_back(lambda: self._group.watch(self._load(), after=after)))  # noqa: B023
            except ActorGone as error:
                logger.warning("the simulated engines are still away: %s", error)
                continue
            await self._tell_if_idle()

    async def _tell_if_idle(self) -> None:
        """What cannot be told now is told after the next change that is heard."""
        if self._rollouts or self.engine.served.admitting:
            return
        with suppress(ActorGone):
            await until_back(lambda: self._group.idle(self._load(), self.engine.served.number))

    def _load(self) -> WorkerLoad:
        return WorkerLoad(
            worker=self._worker,
            rollouts=self._rollouts,
            generated_s=self.engine.generated_s,
            sessions=self._sessions,
        )
