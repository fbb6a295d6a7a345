"""Engine group: starts, attaches, supervises and replaces the engines, and pushes weights to them.

Invariants:
- One push runs at a time. It waits for an engine that is starting or draining only if no other engine has taken the
  weights.
- An engine gets traffic only while it is healthy and holds the newest version that was pushed to it completely.
- An engine that the group started is killed and replaced by a new process when it fails a push, dies, misses
  `health_misses` consecutive health checks, or leaves several consecutive turns unanswered. An attached engine is taken
  out of routing until a push to it alone has succeeded. Both get the newest weights before they get traffic; repeated
  failures increase the delay between attempts.
- When a sender dies, the engines that it was sending to are lost; the next sender pushes to the engines that it had not
  reached.
- The newest snapshot is journalled before its push begins, and every phase before it is entered: a restarted group
  knows the state that its predecessor left, takes over the engines that outlived it, and brings all of them up to that
  snapshot.
- Routing tables are published periodically: a restarted gateway receives one within a supervision interval.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import aiohttp

from headrace.actors.engines.config import EnginesConfig, check_url
from headrace.actors.engines.devices import plan_devices, visible_devices
from headrace.actors.engines.fleet import EngineContext, Fleet, attached_id
from headrace.actors.engines.gate import GatewayGate
from headrace.actors.engines.health import HealthChecks, leave, recover, router_workers
from headrace.actors.engines.host import receiver_of
from headrace.actors.engines.journal import PushJournal
from headrace.actors.engines.members_file import EngineStatus, read_roster
from headrace.actors.engines.pusher import Publisher, Pusher
from headrace.actors.engines.registry import LIVING, EngineRegistry, EngineState, Origin
from headrace.actors.engines.requests import RequestBox
from headrace.actors.engines.trainer_link import LearnerActor, TrainerLink
from headrace.actors.errors import EngineGroupError, EngineNotAdded, EngineNotServing, first_cause
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.record.files.metrics import MetricsWriter
from headrace.actors.runtime.actors.runtime import RayRuntime, node_address
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, PauseMode
from headrace.policies.errors import EngineStartFailed, EngineUnavailable, PolicyError
from headrace.policies.learner import WeightsSnapshot
from headrace.policies.processes.engine_keys import EngineKeyFiles, is_loopback
from headrace.policies.push.contract import PushConfig
from headrace.policies.push.directories import DirectoryReaders, SnapshotDirectories
from headrace.policies.push.machine import Phase
from headrace.policies.push.sender import SenderConfig, SenderProcess
from headrace.sandboxes.host.key_files import make_key

logger = logging.getLogger(__name__)

SUPERVISION_S = 2.0


class EngineGroup:
    """Actor that owns a run's engines. The folder `shared`, by default `engines` in the run directory, has the key of
    those that it starts and the snapshots that engines read by disk; they may also load weights from `snapshots`, which
    learners write to. Their nodes must see all of these."""

    def __init__(
        self,
        config: EnginesConfig,
        push_config: PushConfig,
        *,
        gateways: Sequence[GatewayActor],
        metrics: MetricsWriter,
        model_dir: Path,
        seed: int,
        observing: ActorTelemetry,
        runtime: RayRuntime | None = None,
        shared: Path | None = None,
        snapshots: tuple[Path, ...] = (),
        learner: LearnerActor | None = None,
    ) -> None:
        """`learner` is the learner's actor, which may not be running yet; live weights need it."""
        if observing.run_dir is None:
            raise ValueError("the engine group writes logs and journals: pass a run directory")
        self._config, self._observing = config, observing
        self._push_config = push_config = reachable(push_config, runtime)
        self._directory = observing.run_dir / "engines"
        self._key_file, self._published = ((shared or self._directory) / name for name in ("key", "weights"))
        self._readable = (self._published, *snapshots)
        self._context = EngineContext(
            model_dir=model_dir,
            directory=self._directory,
            seed=seed,
            push=push_config,
            runtime=runtime,
            observing=observing,
        )
        self._stack, self._registry = AsyncExitStack(), EngineRegistry()
        self._gate = GatewayGate(gateways, self._registry)
        self._metrics, self._lock = metrics, asyncio.Lock()
        self._journal = PushJournal(self._directory, observing.retention)
        self._requests = RequestBox(self._directory / "requests")
        self._trainer = TrainerLink(learner)

    async def __aenter__(self) -> Self:
        tracing = self._stack.enter_context(self._observing.spans("engines"))
        self._directory.mkdir(parents=True, exist_ok=True)
        make_key(self._key_file)
        try:
            self._http = await self._stack.enter_async_context(aiohttp.ClientSession())
            devices = plan_devices(self._config, self._push_config, visible_devices())
            self._sender = SenderProcess(SenderConfig(log_path=self._directory / "sender.log", devices=devices.sender))
            keys = EngineKeyFiles(own=self._key_file, attached=self._config.key_file)
            url = await self._stack.enter_async_context(receiver_of(self._config, tracing))
            context = replace(
                self._context, devices=devices.engines, keys=keys, snapshots=self._readable, traces_url=url
            )
            self._fleet = Fleet(self._config, self._registry, context, self._http)
            readers = DirectoryReaders(is_member=self._fleet.members.__contains__)
            directories = SnapshotDirectories(self._published, self._context.model_dir, readers)
            if (broken := self._journal.broken()) is not None:
                for engine_id in broken.in_phase(Phase.BROADCAST):
                    readers.mark(engine_id, directories.path_of(PolicyVersion.parse(broken.version)))
            self._publisher = Publisher(self._directory / "members.json", self._fleet, self._registry, self._gate)
            self._pusher = Pusher(
                self._push_config,
                self._fleet,
                self._registry,
                sender=self._sender,
                directories=directories,
                gate=self._gate,
                journal=self._journal,
                metrics=self._metrics,
                settled=self._publisher.write_roster,
                trainer=self._trainer,
                copy=self._push_config.copies_dir / self._observing.run_id,
            )
            self._health = HealthChecks(
                self._fleet,
                self._registry,
                self._gate,
                self._pusher,
                timeout_s=self._config.health_timeout_s,
                misses=self._config.health_misses,
            )
            self._stack.push_async_callback(self._fleet.stop_all)
            async with asyncio.TaskGroup() as starting:
                starting.create_task(self._stack.enter_async_context(self._sender))
                starting.create_task(self._gather_engines())
            await self._catch_up()
            await self._publisher.publish()
            tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
            # Starting an engine may take minutes, and a push holds the lock for minutes: neither delays a table.
            actions = (self._supervise, self._fleet.start_missing, self._publisher.publish)
            self._loops = [tasks.create_task(_repeat(action)) for action in actions]
        except BaseException as error:
            await self._stack.aclose()
            if isinstance(error, BaseExceptionGroup):
                raise first_cause(error) from error
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for loop in self._loops:
            loop.cancel()
        await self._stack.aclose()

    async def push(self, snapshot: WeightsSnapshot, *, rollouts_in_flight: int) -> None:
        """Push these weights to every engine, wave by wave; if none takes them, to newly started engines.
        `rollouts_in_flight` is the number of rollouts in flight when the push begins, for the metrics.

        Does nothing if the snapshot's epoch is older than the newest one: its learner is dead. Raises EngineUnavailable
        when no engine accepted the weights, ModelInvalid, SenderFailed.
        """
        async with self._lock:
            newest = self._journal.newest()
            if newest is not None and snapshot.version.epoch < newest.version.epoch:
                return
            self._journal.write_newest(snapshot)
            engines = [entry.engine_id for entry in self._registry.in_state(EngineState.WAITING, EngineState.SERVING)]
            with self._pusher.pushing():
                await self._pusher.push(engines, snapshot, rollouts_in_flight)
            if not self._serves(snapshot):
                # Replace our own failed engines, and give the attached ones another attempt.
                for entry in self._registry.in_state(EngineState.QUARANTINED):
                    if entry.origin.is_ours:
                        await self._fleet.end(entry.engine_id, "no engine accepted the weights")
                await self._fleet.start_missing(at_once=True)
                await self._bring_up_to_date(at_once=True)
            await self._publisher.publish()
            if not self._serves(snapshot):
                raise EngineUnavailable(
                    f"no engine could be updated to version {snapshot.version}: see engines/*.log in the run directory"
                )

    async def serving(self, *, unlike: bool, timeout_s: float) -> bool:
        """Return True if any engine is getting traffic. Waits until the result differs from `unlike`, for at most
        `timeout_s`."""
        return await self._publisher.wait_for_serving(unlike=unlike, timeout_s=timeout_s)

    async def served_version(self) -> PolicyVersion | None:
        """Return the newest snapshot's version if an engine is serving it. Waits for a push in progress."""
        async with self._lock:
            newest = self._journal.newest()
            return newest.version if newest is not None and self._serves(newest) else None

    async def holding(self, version: PolicyVersion) -> list[EngineId]:
        """Return the engines that report this version of their weights, whoever pushed it."""
        async with self._lock:
            return await self._pusher.holding(version)

    async def rollout_engine(self, engine_id: EngineId, method: str, arguments: Mapping[str, Any]) -> None:
        """Do what a trainer's weight updater asks of an engine in the push of its weights. Raises PushError."""
        await self._trainer.answer(engine_id, method, arguments)

    async def status(self) -> list[EngineStatus]:
        """Return the status of every engine, including those that left most recently."""
        return list(self._fleet.statuses(time.monotonic()))

    async def add(self, url: str) -> str:
        """Attach a running server, push the newest weights to it, and return its name. Idempotent. Raises
        EngineGroupError, ModelInvalid, SenderFailed."""
        try:
            url = check_url(url)
        except ValueError as error:
            raise EngineNotAdded(str(error)) from error
        async with self._lock:
            if self._registry.stands(attached_id(url), EngineState.LEAVING):
                raise EngineNotAdded(f"{url} is still leaving: add it again once it is gone")
            self._fleet.retired.discard(attached_id(url))
            try:
                engine_id = await self._fleet.attach(url, Origin.ATTACHED)
            except EngineNotAdded:
                # The operator gets the error now. A server named in the recipe stays: it may still be starting.
                await self._fleet.end(attached_id(url), "it did not answer when it was added")
                raise
            await self._bring_up_to_date()
            await self._publisher.publish()
            newest = self._journal.newest()
            # Live weights come with the next push, if the learner is in a step.
            is_due = newest is not None and not newest.live
            if is_due and not self._registry.stands(engine_id, EngineState.SERVING):
                reason = self._registry[engine_id].reason
                raise EngineNotServing(
                    f"{engine_id} was added but gets no traffic until a retry succeeds in pushing weights to it: "
                    f"{reason}"
                )
            return engine_id

    async def remove(self, engine_id: EngineId) -> None:
        """Let an engine finish its requests, within `drain_timeout_s`, and remove it for good. Idempotent. Raises
        EngineUnknown."""
        self._fleet.retired.add(self._registry[engine_id].place)
        await self._let_go(engine_id, "it was removed")

    async def vacate(self, node: str, host: str) -> list[EngineId]:
        """Take the engines on a node (Ray id, address) out of service, and replace them elsewhere. Idempotent."""
        self._fleet.avoided.add(node)
        there = self._fleet.placed_on(host)
        async with asyncio.TaskGroup() as leaving:
            for engine_id in there:
                leaving.create_task(self._let_go(engine_id, "its node is drained"))
        return there

    async def _let_go(self, engine_id: EngineId, reason: str) -> None:
        # Only marking it needs the lock: no later push takes it, and its requests end while pushes continue.
        async with self._lock:
            if not self._registry.stands(engine_id, *LIVING):
                return
            self._registry.leaving(engine_id)
            await self._publisher.publish()
        if engine_id in self._fleet.members:
            await leave(self._fleet[engine_id].client, self._gate, timeout_s=self._config.drain_timeout_s)
        await self._fleet.end(engine_id, reason)
        await self._publisher.publish()

    def _serves(self, snapshot: WeightsSnapshot) -> bool:
        return any(entry.version == snapshot.version for entry in self._registry.in_state(EngineState.SERVING))

    async def _gather_engines(self) -> None:
        """Take over engines of an earlier group, attach the configured ones, and start engines in the slots that are
        still free. Raises EngineStartFailed when there is no engine."""
        roster = read_roster(self._directory / "members.json")
        self._fleet.started, self._fleet.retired = roster.started, set(roster.retired)
        await self._publisher.follow(roster)
        in_place = self._push_config.pause_mode is PauseMode.IN_PLACE
        await recover(
            roster, self._journal.broken(), self._fleet, self._registry, self._pusher, self._gate, in_place=in_place
        )
        # Engines in quarantine get no traffic from now on.
        await self._publisher.publish()
        for url in self._config.attach:
            if attached_id(url) not in self._fleet.retired:
                try:
                    await self._fleet.attach(url, Origin.ATTACHED)
                except EngineGroupError as error:
                    logger.warning("an attached engine does not answer yet: %s", error)
        await self._follow_router()
        failures = await self._fleet.start_missing()
        await self._publisher.publish()
        hopeful = {EngineState.WAITING, EngineState.SERVING, *([EngineState.QUARANTINED] if roster.engines else [])}
        if not self._registry.in_state(*hopeful):
            raise failures[0] if failures else no_engine(self._registry, self._config.router)

    async def _follow_router(self) -> None:
        """Attach the router's new workers, and remove those that it no longer lists."""
        if self._config.router is None:
            return
        workers = await router_workers(self._config.router, self._http, self._fleet.keys.key_of(attached=True))
        if workers is None:
            return
        for url in workers:
            if attached_id(url) in self._fleet.retired or self._registry.at(url) is not None:
                continue
            try:
                async with self._lock:
                    await self._fleet.attach(url, Origin.ROUTER)
            except EngineGroupError as error:
                logger.warning("a worker of the router does not answer yet: %s", error)
        named = {attached_id(url) for url in workers}
        for entry in self._registry.living():
            if entry.origin is Origin.ROUTER and entry.engine_id not in named:
                await self._let_go(entry.engine_id, "the router no longer lists it")

    async def _bring_up_to_date(self, *, at_once: bool = False) -> None:
        """Push the newest weights to every engine that lacks them; before the first push there are none. Engines whose
        breaker is open are skipped, unless `at_once`."""
        snapshot = self._journal.newest()
        # A trainer that has trained on brings the engines up to date with its next push.
        if snapshot is None or (snapshot.live and not await self._trainer.holds(snapshot.version)):
            return
        due = self._registry.due(time.monotonic(), at_once=at_once)
        waiting = [entry.engine_id for entry in due if entry.state is EngineState.WAITING]
        stale = [
            entry.engine_id
            for entry in self._registry.in_state(EngineState.SERVING)
            if entry.version != snapshot.version
        ]
        with self._pusher.pushing():
            await self._pusher.push([*stale, *waiting], snapshot)
            for entry in due:
                if entry.state is EngineState.QUARANTINED and not entry.origin.is_ours:
                    await self._pusher.readmit(entry.engine_id, snapshot)

    async def _supervise(self) -> None:
        """Replace engines that died, hang or were quarantined, answer operators' requests, and push to engines that
        lack the newest weights."""
        failed = await self._health.check()
        # Killed before the lock is taken: a push that waits for a hung engine ends by that.
        for engine_id in failed:
            if (member := self._fleet.members.get(engine_id)) is not None:
                await member.handle.kill()
        if self._pusher.is_pushing:
            # The failure is found again as soon as the push is over.
            return
        pushes = self._pusher.pushes
        async with self._lock:
            # The outcome of a push that got the lock first is newer than these health checks.
            if self._pusher.pushes != pushes:
                failed = {}
            for engine_id, problem in failed.items():
                # It may have been removed meanwhile.
                if self._registry.stands(engine_id, EngineState.WAITING, EngineState.SERVING):
                    logger.warning("engine %s is out of routing: %s", engine_id, problem)
                    self._registry.quarantine(engine_id, problem, time.monotonic())
            for entry in self._registry.in_state(EngineState.QUARANTINED):
                if entry.origin.is_ours:
                    await self._fleet.end(entry.engine_id, f"it was replaced: {entry.reason}")
            await self._publisher.publish()
            await self._health.free_held_turns()
        await self._requests.answer_all(add=self.add, remove=self.remove)
        await self._follow_router()
        await self._catch_up()
        await self._publisher.publish()

    async def _catch_up(self) -> None:
        # A snapshot that cannot be pushed, for example a corrupt one, stops nothing: the next one may be valid.
        async with self._lock:
            try:
                await self._bring_up_to_date()
            except PolicyError:
                logger.exception("engines could not be brought up to date; the next supervision pass will try again")


def no_engine(registry: EngineRegistry, router: str | None) -> EngineStartFailed:
    """Return the error of a group whose engines do not answer, with the reason for each."""
    reasons = "; ".join(f"{entry.engine_id}: {entry.reason}" for entry in registry.all())
    return EngineStartFailed(reasons or f"engines.router {router} lists no worker, and engines.count is 0")


def reachable(push: PushConfig, runtime: RayRuntime | None) -> PushConfig:
    """Return the config with an address of the sender that engines on other nodes of a cluster can reach."""
    if runtime is None or not runtime.is_cluster or not is_loopback(push.host):
        return push
    return push.model_copy(update={"host": node_address()})


async def _repeat(action: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(SUPERVISION_S)
        await action()
