"""Simulated engines of a run: one actor that receives pushes, and its view in each worker process.

Invariants:
- There is one push at a time; a snapshot from an earlier epoch than the newest one is not served.
- A worker learns of changes through one long-polling call rather than one call per turn.
- With a directory, the served version is journalled, and a restarted actor serves it again.
- A drain waits for every worker, except those that have not called for `FORGOTTEN_S`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, Self

import orjson
from opentelemetry import trace
from opentelemetry.context import Context

from headrace.actors.errors import ActorGone
from headrace.actors.record.files.metrics import UNRECORDED, MetricsWriter, SimulatedPushMetric
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.recording import record
from headrace.buffer.primitives.durable_files import write_private
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.buffer.primitives.slowdowns import Slowdowns, SlowKind
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.learners.simulated import PushMode, Served, SimulatedEngine, SimulatedEnginesConfig
from headrace.serve.tracing import span_names as names

logger = logging.getLogger(__name__)
tracer = trace.get_tracer("headrace.actors.runtime.simulated.engines")

WATCH_S: Final = 10.0
"""Maximum duration of one long-polling call."""
FORGOTTEN_S: Final = 30.0
"""Time without a call after which a worker counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Load of one worker. `rollouts` is the number of open sessions, `generated_s` the total time of all turns."""

    worker: str
    rollouts: int
    generated_s: float
    sessions: int
    """Number of sessions that have ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedEnginesStatus:
    """Served version, loads of the workers and number of pushes."""

    served: Served
    loads: tuple[WorkerLoad, ...]
    pushes: int


class SimulatedEngineGroup:
    """Actor that replaces the engine group and serves the versions pushed to it."""

    def __init__(
        self,
        config: SimulatedEnginesConfig,
        *,
        metrics: MetricsWriter = UNRECORDED,
        directory: RunDirectory | None = None,
    ) -> None:
        self._config = config
        self._metrics = metrics
        self._journal = None if directory is None else directory.path / "served.json"
        self._served = Served(config=config)
        self._slowdowns = Slowdowns(config.slowdowns, seed=config.seed)
        self._changed = asyncio.Event()
        self._pushing = asyncio.Lock()
        self._loads: dict[str, WorkerLoad] = {}
        self._heard_s: dict[str, float] = {}
        self._idle: set[str] = set()
        self._has_drained = asyncio.Event()
        self._pushes = 0

    async def __aenter__(self) -> Self:
        if self._journal is not None and self._journal.exists():
            try:
                known = orjson.loads(self._journal.read_bytes())
                # Generating and admitting, because the state of a push during the crash is unknown.
                version = PolicyVersion.parse(known["version"]) if known["version"] else None
                self._served = replace(self._served, number=known["number"] + 1, version=version)
            except (KeyError, TypeError, ValueError) as error:
                logger.warning("%s is damaged (%r): the engines wait for the next push", self._journal, error)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: there are no resources to close."""

    async def push(self, snapshot: WeightsSnapshot, *, rollouts_in_flight: int) -> None:
        """Serve this version after `push_s`, or longer for a slow push, in the configured push mode."""
        async with self._pushing:
            newest = self._served.version
            if newest is not None and snapshot.version.epoch < newest.epoch:
                return
            now = asyncio.get_running_loop().time
            began_s, version = now(), str(snapshot.version)
            named = {names.PUSH_VERSION: version, names.PUSH_TRANSPORT: "simulated"}
            with tracer.start_as_current_span(names.PUSH, Context(), attributes=named):
                if self._config.push is PushMode.DRAIN and newest is not None:
                    await self._drain()
                self._serve(generating=self._config.push is not PushMode.PAUSE)
                slow = self._slowdowns.factor(SlowKind.GATE, "", version)
                await asyncio.sleep(self._config.push_s * slow)
                self._serve(version=snapshot.version, generating=True, admitting=True)
            self._pushes += 1
            pushed = SimulatedPushMetric(
                version=version, total_s=now() - began_s, rollouts_in_flight=rollouts_in_flight
            )
            await record(self._metrics, pushed)

    async def _drain(self) -> None:
        """Wait until every living worker has reported that it runs nothing."""
        now = asyncio.get_running_loop().time
        self._serve(admitting=False)
        while any(
            worker not in self._idle and now() - heard_s <= FORGOTTEN_S for worker, heard_s in self._heard_s.items()
        ):
            self._has_drained.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._has_drained.wait()

    async def served_version(self) -> PolicyVersion | None:
        """Return the served version, as `EngineGroup.served_version` does."""
        async with self._pushing:
            return self._served.version

    async def watch(self, load: WorkerLoad, *, after: int) -> Served:
        """Return the served state as soon as its number exceeds `after`, or after `WATCH_S` at the latest."""
        self._hear(load)
        if self._served.number < after:
            # The journal of the previous group was lost, and the worker would ignore lower numbers.
            self._served = replace(self._served, number=after)
            self._serve()
        if self._served.number <= after:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_S):
                    await self._changed.wait()
        self._heard_s[load.worker] = asyncio.get_running_loop().time()
        return self._served

    async def idle(self, load: WorkerLoad, number: int) -> None:
        """Record that this worker has seen change `number` and is running nothing."""
        self._hear(load)
        if number == self._served.number:
            self._idle.add(load.worker)
            self._has_drained.set()

    async def serving(self, *, unlike: bool, timeout_s: float) -> bool:
        """Return True if turns can begin. Waits until the result differs from `unlike`, for at most `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._served.reachable is unlike:
                    await self._changed.wait()
        return self._served.reachable

    async def go_down(self) -> None:
        """Simulate an outage: no turn begins, and turns that wait too long fail."""
        self._serve(reachable=False)

    async def come_back(self) -> None:
        """End the outage."""
        self._serve(reachable=True)

    async def status(self) -> SimulatedEnginesStatus:
        """Return the served version, the loads of the workers and the number of pushes."""
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


class EngineWatch(ResourceOwner):
    """One worker process's view of the engines; an async context manager."""

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
        """Wait until a rollout may begin, and count it."""
        await self.engine.admitted()
        self._rollouts += 1

    async def end(self) -> None:
        """Count the end of a rollout."""
        self._rollouts -= 1
        self._sessions += 1
        await self._report_if_idle()

    async def _watch(self) -> None:
        """Follow changes until cancelled, however long the actor is down: rollouts would wait forever if this task
        ended before the actor returned."""
        while True:
            after = self.engine.served.number
            try:
                self.engine.set_served(await until_back(lambda: self._group.watch(self._load(), after=after)))  # noqa: B023
            except ActorGone as error:
                logger.warning("the simulated engines are still down: %s", error)
                continue
            await self._report_if_idle()

    async def _report_if_idle(self) -> None:
        """Report an idle worker to the engines; a report that fails is repeated after the next change."""
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
