"""The engine group: who is healthy, who holds which version; it alone runs the control sequence of a push.

Invariants:
- One push at a time, and none waits for an engine that starts or drains, unless no engine took the weights.
- An engine gets traffic only while it is healthy and holds the newest version that was pushed to it completely.
- An engine of ours that failed a push, died, misses `health_misses` health checks in a row, or leaves turn after turn
  without an end, is killed and replaced by a new process. One that is not ours is out of routing until a push to it
  alone went well. Both are caught up before they get traffic; what fails again and again is tried ever more seldom.
- A dead sender costs the engines that it was just sending to; what it did not reach is pushed again by the next one.
- The newest snapshot is journalled before its push begins, and every phase before it is taken: a restarted group knows
  what its predecessor left, takes over the engines that outlived it, and brings all of them to that snapshot.
- Routing tables are counted and published again and again: a restarted gateway has one within a supervision interval.
  The count goes on over restarts of the group, and no clock is in it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Self

import aiohttp

from headrace.actors.engine_group.config import check_url
from headrace.actors.engine_group.errors import EngineGroupError, EngineNotAdded, EngineNotServing
from headrace.actors.engine_group.fleet import EngineContext, Fleet, foreign_id
from headrace.actors.engine_group.gate import GatewayGate
from headrace.actors.engine_group.health import HealthChecks
from headrace.actors.engine_group.journal import PushJournal
from headrace.actors.engine_group.members_file import Roster, read_roster
from headrace.actors.engine_group.pusher import Pusher
from headrace.actors.engine_group.recovery import recover
from headrace.actors.engine_group.registry import LIVING, EngineRegistry, EngineState, Origin
from headrace.actors.engine_group.removal import leave
from headrace.actors.engine_group.requests import RequestBox
from headrace.actors.engine_group.router import router_workers
from headrace.actors.errors import first_cause
from headrace.policies.engine import EngineId, PauseMode
from headrace.policies.errors import EngineStartFailed, EngineUnavailable, PolicyError
from headrace.policies.push.sender import SenderConfig, Senders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path
    from types import TracebackType

    from headrace.actors.engine_group.config import EnginesConfig
    from headrace.actors.engine_group.members_file import EngineStatus
    from headrace.actors.places.gateway import GatewayActor
    from headrace.actors.record.actor_telemetry import ActorTelemetry
    from headrace.actors.runtime.runtime import RayRuntime
    from headrace.buffer.versions import PolicyVersion
    from headrace.policies.learner import WeightsSnapshot
    from headrace.policies.push.contract import PushConfig

logger = logging.getLogger(__name__)

SUPERVISION_S = 2.0
TABLES_BITS = 32
"""A table's version is the group's incarnation, shifted by so many bits, and the number of the table."""


class EngineGroup:
    """Starts, attaches, watches and replaces the engines, and pushes weights into them."""

    def __init__(
        self,
        config: EnginesConfig,
        push_config: PushConfig,
        *,
        gateway: GatewayActor,
        model_dir: Path,
        seed: int,
        observing: ActorTelemetry,
        runtime: RayRuntime | None = None,
    ) -> None:
        if observing.run_dir is None:
            raise ValueError("engines keep logs and journals: they need a run directory")
        self._config = config
        self._push_config = push_config
        self._observing = observing
        self._directory = observing.run_dir / "engines"
        self._ground = EngineContext(
            model_dir=model_dir,
            directory=self._directory,
            seed=seed,
            push=push_config,
            runtime=runtime,
        )
        self._stack = AsyncExitStack()
        self._registry = EngineRegistry()
        self._gate = GatewayGate(gateway, self._registry)
        self._journal = PushJournal(self._directory, observing.retention)
        self._requests = RequestBox(self._directory / "requests")
        self._lock = asyncio.Lock()
        self._pushes = 0
        self._incarnation = self._tables = 0
        self._serves = False
        self._published = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._observing.spans("engines"))
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            http = await self._stack.enter_async_context(aiohttp.ClientSession())
            self._make_parts(http)
            self._stack.push_async_callback(self._fleet.stop_all)
            async with asyncio.TaskGroup() as starting:
                starting.create_task(self._stack.enter_async_context(self._senders))
                starting.create_task(self._gather_engines())
            await self._catch_up()
            await self._publish()
            tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
            loops = (self._supervise(), self._fill_places(), self._publish_on())
            self._loops = [tasks.create_task(loop) for loop in loops]
        except BaseException as error:
            await self._stack.aclose()
            if isinstance(error, BaseExceptionGroup):
                raise first_cause(error) from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for loop in self._loops:
            loop.cancel()
        await self._stack.aclose()

    def _make_parts(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._senders = Senders(SenderConfig(log_path=self._directory / "sender.log"))
        self._fleet = Fleet(self._config, self._registry, self._ground, http)
        self._pusher = Pusher(
            self._push_config,
            self._fleet,
            self._registry,
            senders=self._senders,
            gate=self._gate,
            journal=self._journal,
            metrics=self._observing.metrics(),
            settled=self._write_roster,
        )
        self._health = HealthChecks(
            self._fleet,
            self._registry,
            self._gate,
            timeout_s=self._config.health_timeout_s,
            misses=self._config.health_misses,
            pushes=lambda: self._pushes,
        )

    async def push(self, snapshot: WeightsSnapshot, *, rollouts_in_flight: int) -> None:
        """Send these weights to every engine, wave by wave; when none takes them, to new engines. `rollouts_in_flight`
        is what runs as the push begins, for the record.

        Nothing is done for a snapshot of an earlier epoch than the newest one: its learner is dead. Raises
        EngineUnavailable when no engine took the weights, ModelInvalid, SenderFailed.
        """
        async with self._lock:
            newest = self._journal.newest()
            if newest is not None and snapshot.version.epoch < newest.version.epoch:
                return
            self._journal.write_newest(snapshot)
            engines = [entry.engine_id for entry in self._registry.in_state(EngineState.WAITING, EngineState.SERVING)]
            async with self._pushing():
                await self._pusher.push(engines, snapshot, rollouts_in_flight)
            if not self._serving(snapshot):
                await self._try_again()
            await self._publish()
            if not self._serving(snapshot):
                raise EngineUnavailable(f"no engine, old or new, took version {snapshot.version}: see engines/*.log")

    async def serving(self, *, unlike: bool, timeout_s: float) -> bool:
        """Whether an engine gets traffic, as soon as that is not `unlike`, or after `timeout_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._serves is unlike:
                    await self._published.wait()
        return self._serves

    async def served_version(self) -> PolicyVersion | None:
        """The newest snapshot's version if an engine serves it, once a push under way is over."""
        async with self._lock:
            newest = self._journal.newest()
            return newest.version if newest is not None and self._serving(newest) else None

    async def status(self) -> list[EngineStatus]:
        """Every engine, the last ones that are gone too."""
        return list(self._fleet.statuses(time.monotonic()))

    async def add(self, url: str) -> str:
        """Attach a server that somebody started and bring it to the newest weights; its name. Idempotent. Raises
        EngineGroupError, ModelInvalid, SenderFailed."""
        try:
            url = check_url(url)
        except ValueError as error:
            raise EngineNotAdded(str(error)) from error
        async with self._lock:
            return await self._add(url)

    async def remove(self, engine_id: EngineId) -> None:
        """Let an engine finish what it runs, within `drain_timeout_s`, and take it out for good. Idempotent. Raises
        EngineUnknown."""
        self._fleet.retired.add(self._registry[engine_id].place)
        await self._let_go(engine_id, "it was removed")

    async def _add(self, url: str) -> str:
        if self._registry.stands(foreign_id(url), EngineState.LEAVING):
            raise EngineNotAdded(f"{url} is still leaving: add it again once it is gone")
        self._fleet.retired.discard(foreign_id(url))
        try:
            engine_id = await self._fleet.attach(url, Origin.ATTACHED)
        except EngineNotAdded:
            # An operator hears of it now; a recipe's server may still be starting.
            await self._fleet.end(foreign_id(url), "it did not answer when it was added")
            raise
        await self._bring_up_to_date()
        await self._publish()
        if self._journal.newest() is not None and not self._registry.stands(engine_id, EngineState.SERVING):
            reason = self._registry[engine_id].reason
            raise EngineNotServing(f"{engine_id} joined, is tried again, and gets no traffic until then: {reason}")
        return engine_id

    async def _let_go(self, engine_id: EngineId, reason: str) -> None:
        """From its mark on no push takes it: what it runs ends while pushes go on."""
        async with self._lock:
            if not self._registry.stands(engine_id, *LIVING):
                return
            self._registry.leaving(engine_id)
            await self._publish()
        if engine_id in self._fleet.members:
            await leave(self._fleet[engine_id].client, self._gate, timeout_s=self._config.drain_timeout_s)
        await self._fleet.end(engine_id, reason)
        await self._publish()

    def _serving(self, snapshot: WeightsSnapshot) -> bool:
        return any(entry.version == snapshot.version for entry in self._registry.in_state(EngineState.SERVING))

    @property
    def _is_pushing(self) -> bool:
        return self._pushes % 2 == 1

    @asynccontextmanager
    async def _pushing(self) -> AsyncIterator[None]:
        """Health checks know that engines may be paused; the number is odd meanwhile."""
        self._pushes += 1
        try:
            yield
        finally:
            self._pushes += 1

    async def _gather_engines(self) -> None:
        """Those that outlived an earlier group, those that are attached, and new ones for the places that are left.
        Raises EngineStartFailed when there is none."""
        roster = read_roster(self._directory / "members.json")
        self._fleet.started, self._fleet.retired = roster.started, set(roster.retired)
        await self._count_incarnation(roster)
        in_place = self._push_config.pause_mode is PauseMode.IN_PLACE
        await recover(
            roster, self._journal.broken(), self._fleet, self._registry, self._pusher, self._gate, in_place=in_place
        )
        # What is in doubt gets no traffic from now on.
        await self._publish()
        await self._attach_configured()
        await self._follow_router()
        failures = await self._fleet.start_missing()
        await self._publish()
        hopeful = {EngineState.WAITING, EngineState.SERVING, *([EngineState.QUARANTINED] if roster.engines else [])}
        if not self._registry.in_state(*hopeful):
            raise failures[0] if failures else EngineStartFailed(self._why_nobody_is_there())

    async def _count_incarnation(self, roster: Roster) -> None:
        """One more than the group's before, by its roster and by the gateway's table: either may have been lost."""
        stats = await self._gate.stats()
        published = 0 if stats is None else max(0, stats.table_version) >> TABLES_BITS
        self._incarnation = max(roster.incarnation, published) + 1

    def _why_nobody_is_there(self) -> str:
        reasons = [f"{entry.engine_id}: {entry.reason}" for entry in self._registry.all()]
        return "; ".join(reasons) or f"engines.router {self._config.router} names no worker, and engines.count is 0"

    async def _attach_configured(self) -> None:
        for url in self._config.attach:
            if foreign_id(url) in self._fleet.retired:
                continue
            try:
                await self._fleet.attach(url, Origin.ATTACHED)
            except EngineGroupError as error:
                logger.warning("an attached engine is not there yet: %s", error)

    async def _follow_router(self) -> None:
        """Attach workers that are new to us, let go of those that the router no longer names."""
        if self._config.router is None:
            return
        workers = await router_workers(self._config.router, self._http)
        if workers is None:
            return
        for url in workers:
            if foreign_id(url) in self._fleet.retired or self._registry.at(url) is not None:
                continue
            try:
                async with self._lock:
                    await self._fleet.attach(url, Origin.ROUTER)
            except EngineGroupError as error:
                logger.warning("a worker of the router is not there yet: %s", error)
        named = {foreign_id(url) for url in workers}
        for entry in self._registry.living():
            if entry.origin is Origin.ROUTER and entry.engine_id not in named:
                await self._let_go(entry.engine_id, "the router no longer names it")

    async def _bring_up_to_date(self, *, at_once: bool = False) -> None:
        """The newest weights to every engine that lacks them; without any, all wait for the first push. What failed
        again and again has to wait, unless `at_once`."""
        snapshot = self._journal.newest()
        if snapshot is None:
            return
        due = self._registry.due(time.monotonic(), at_once=at_once)
        waiting = [entry.engine_id for entry in due if entry.state is EngineState.WAITING]
        stale = [
            entry.engine_id
            for entry in self._registry.in_state(EngineState.SERVING)
            if entry.version != snapshot.version
        ]
        async with self._pushing():
            await self._pusher.push([*stale, *waiting], snapshot)
            for entry in due:
                if entry.state is EngineState.QUARANTINED and not entry.origin.is_ours:
                    await self._pusher.readmit(entry.engine_id, snapshot)

    async def _try_again(self) -> None:
        """New engines for those of ours that are in doubt; the others get another chance."""
        for entry in self._registry.in_state(EngineState.QUARANTINED):
            if entry.origin.is_ours:
                await self._fleet.end(entry.engine_id, "no engine took the weights")
        await self._fleet.start_missing(at_once=True)
        await self._bring_up_to_date(at_once=True)

    async def _publish(self) -> None:
        """Tell the disk who is here, and the gateway who is in routing."""
        self._write_roster()
        self._tables += 1
        await self._gate.route(self._registry.table((self._incarnation << TABLES_BITS) + self._tables))
        self._serves = bool(self._registry.in_state(EngineState.SERVING))
        self._published.set()
        self._published = asyncio.Event()

    def _write_roster(self) -> None:
        statuses = self._fleet.statuses(time.monotonic())
        roster = Roster(
            engines=statuses,
            started=self._fleet.started,
            retired=frozenset(self._fleet.retired),
            incarnation=self._incarnation,
        )
        roster.write(self._directory / "members.json")

    async def _supervise(self) -> None:
        """Replace what died, hangs or was quarantined; catch up; do what operators ask."""
        while True:
            await asyncio.sleep(SUPERVISION_S)
            failed = await self._health.look()
            # Killed before the lock is taken: whoever waits for a hung engine ends by that.
            for engine_id in failed:
                if (member := self._fleet.members.get(engine_id)) is not None:
                    await member.body.kill()
            if self._is_pushing:
                # What failed is found again as soon as the push is over.
                continue
            pushes = self._pushes
            async with self._lock:
                # A push that came first knows better.
                await self._settle(failed if self._pushes == pushes else {})
                await self._publish()
            await self._answer_requests()
            await self._follow_router()
            await self._catch_up()
            await self._publish()

    async def _publish_on(self) -> None:
        """Again and again, and without the lock: a push may have it for minutes."""
        while True:
            await asyncio.sleep(SUPERVISION_S)
            await self._publish()

    async def _fill_places(self) -> None:
        """Start engines where there are none; it may take minutes. The supervision brings them up to date."""
        while True:
            await asyncio.sleep(SUPERVISION_S)
            await self._fleet.start_missing()

    async def _settle(self, failed: dict[EngineId, str]) -> None:
        """Take out what failed: for good when it is ours, else until it is caught up."""
        for engine_id, problem in failed.items():
            # Meanwhile it may have been removed, or a push may have found out.
            if not self._registry.stands(engine_id, EngineState.WAITING, EngineState.SERVING):
                continue
            logger.warning("engine %s is out of routing: %s", engine_id, problem)
            self._registry.quarantine(engine_id, problem, time.monotonic())
        for entry in self._registry.in_state(EngineState.QUARANTINED):
            if entry.origin.is_ours:
                await self._fleet.end(entry.engine_id, f"it was replaced: {entry.reason}")

    async def _catch_up(self) -> None:
        """What cannot be pushed now, such as a snapshot that is broken, stops nobody: the next push may be well."""
        async with self._lock:
            try:
                await self._bring_up_to_date()
            except PolicyError:
                logger.exception("engines could not be brought up to date; tried again at the next supervision")

    async def _answer_requests(self) -> None:
        for request in self._requests.open():
            engine_id, error = request.what, ""
            try:
                if request.kind == "add":
                    engine_id = await self.add(request.what)
                else:
                    await self.remove(EngineId(request.what))
            except (EngineGroupError, PolicyError) as problem:
                error = str(problem)
            self._requests.answer(request, engine_id=engine_id, error=error)
