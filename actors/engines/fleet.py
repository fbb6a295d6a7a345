"""Fleet of engines: starts, attaches and ends them. The registry holds their states.

Invariants:
- Every engine that has answered is in the registry and in `members`, and leaves both at the same time.
- A start that fails or is cancelled leaves no process and frees its slot.
- Nothing here needs the group's lock: an engine joins or leaves in one step of the event loop.
- A slot is free when the process that held it is dead.
- The name of an engine process is never reused. An attached server is named by its address, is never ended, and counts
  as alive as long as it answers.
- A process that we started dies with its parent, even if the parent is killed with SIGKILL.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import aiohttp

from headrace.actors.engines.config import EnginesConfig, Placement
from headrace.actors.engines.host import EngineHost, HostedEngine, ServerPlan, server_process
from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.engines.registry import LIVING, EngineRegistry, EngineState, Origin, address
from headrace.actors.errors import ActorError, ActorLost, EngineGroupError, EngineNotAdded, first_cause
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.runtime.actors.nodes import NodeRole
from headrace.actors.runtime.actors.runtime import RayRuntime, Resources, node_address
from headrace.policies.engine import EngineId, EngineInfo
from headrace.policies.errors import EngineError, EngineStartFailed, EngineUnavailable
from headrace.policies.processes.engine_keys import EngineKeyFiles, is_loopback
from headrace.policies.processes.server_process import ServerProcess
from headrace.policies.push.contract import PushConfig
from headrace.policies.sglang.client import EngineLoad, SGLangConfig, SGLangEngine
from headrace.policies.tokens.model_keys import read_vocabulary_size

logger = logging.getLogger(__name__)

NO_VERSION = "0.0"
"""Version of weights that we did not push: older than all of ours."""
ASK_HOST_S = 10.0
"""Time limit for an engine's actor to report that it is alive."""


@dataclass(slots=True)
class FleetMember:
    """Engine that has answered. `load` is the last one it reported; `process_id` is set for a process on this host;
    `nodes` are the addresses of the hosts on which Ray placed it."""

    engine_id: EngineId
    client: SGLangEngine
    handle: EngineHandle
    nodes: tuple[str, ...] = ()
    load: EngineLoad | None = None
    process_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Parameters shared by all engines of a group. `runtime` may be None unless Ray places the engines. `devices` are
    the CUDA devices of local engines by slot, `snapshots` the folders from which engines may load weights."""

    model_dir: Path
    directory: Path
    seed: int
    push: PushConfig
    runtime: RayRuntime | None
    devices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keys: EngineKeyFiles = field(default_factory=EngineKeyFiles)
    snapshots: tuple[Path, ...] = ()
    observing: ActorTelemetry
    traces_url: str = ""
    """Receiver of the spans of local engines."""


class Fleet:
    """Engines of one group. `started` counts all engines ever started; `retired` slots stay empty; on the nodes in
    `avoided` (Ray ids) no engines are started."""

    def __init__(
        self, config: EnginesConfig, registry: EngineRegistry, context: EngineContext, http: aiohttp.ClientSession
    ) -> None:
        self._config = config
        self._registry = registry
        self._context = context
        self._http = http
        self._vocab_size = read_vocabulary_size(context.model_dir)
        self.keys = context.keys
        self.members: dict[EngineId, FleetMember] = {}
        self.started = 0
        self.retired: set[str] = set()
        self.avoided: set[str] = set()
        self._rounds = asyncio.Lock()

    def __getitem__(self, engine_id: EngineId) -> FleetMember:
        return self.members[engine_id]

    def placed_on(self, host: str) -> list[EngineId]:
        """Return the engines that Ray placed on the node with this address, wholly or in part."""
        return [engine_id for engine_id, member in self.members.items() if host in member.nodes]

    async def start_missing(self, *, at_once: bool = False) -> list[EngineStartFailed]:
        """Start engines in the free slots and return the errors of those that did not start. A slot whose breaker is
        open is skipped, unless `at_once`. No other start is under way when this returns."""
        async with self._rounds:
            now = time.monotonic()
            taken = self.retired | {entry.place for entry in self._registry.living()}
            places = (f"place-{number}" for number in range(1, self._config.count + 1))
            free = [place for place in places if place not in taken and (at_once or self._registry.may_try(place, now))]
            async with asyncio.TaskGroup() as tasks:
                starting = [tasks.create_task(self._start(place)) for place in free]
        failures = [failure for task in starting if (failure := task.result()) is not None]
        for failure in failures:
            logger.warning("an engine did not start; the supervision will try again: %s", failure)
        return failures

    async def attach(self, url: str, origin: Origin) -> EngineId:
        """Attach a running server, which then waits for weights, and return its name. Does nothing for a server that is
        already attached. Raises EngineAddressTaken, EngineNotAdded."""
        url = url.rstrip("/")
        engine_id = attached_id(url)
        known = self._registry.at(url)
        if known is not None and known.engine_id == engine_id and engine_id in self.members:
            return engine_id
        await self._join(engine_id, url, origin)
        return engine_id

    async def _join(self, engine_id: EngineId, url: str, origin: Origin) -> EngineInfo:
        self._registry.starting(engine_id, place=engine_id, origin=origin, now=time.monotonic(), url=url)
        try:
            self.members[engine_id] = FleetMember(
                engine_id, self._client(engine_id, url, attached=True), AttachedServer()
            )
            return await self.ask(engine_id)
        except EngineError as error:
            self._registry.quarantine(engine_id, f"it did not answer: {error}", time.monotonic())
            raise EngineNotAdded(f"{url} does not answer as an engine: {error}") from error

    async def adopt(self, status: EngineStatus) -> EngineInfo | None:
        """Take over an engine that outlived its group. Returns None when it is gone or does not answer."""
        if status.origin is Origin.LOCAL or status.place in self.retired:
            return None
        if status.origin is not Origin.RAY:
            try:
                return await self._join(attached_id(status.url), status.url, status.origin)
            except EngineGroupError as error:
                logger.warning("an attached engine gets no traffic until it answers: %s", error)
                return None
        assert self._context.runtime is not None
        placed = PlacedProcess(self._context.runtime)
        try:
            for name in self._host_names(status.engine_id):
                with suppress(ActorError):
                    placed.hosts.append(await self._context.runtime.find(EngineHost, name))
            member = self._placed(status.engine_id, placed, [await host.address() for host in placed.hosts])
        except (ActorError, EngineError):
            # The parts of an engine that has lost one would keep their devices.
            await placed.kill()
            return None
        self._registry.starting(
            status.engine_id, place=status.place, origin=Origin.RAY, now=time.monotonic(), url=member.client.url
        )
        self.members[status.engine_id] = member
        try:
            return await self.ask(status.engine_id)
        except EngineError as error:
            await self.end(status.engine_id, f"it did not answer a new engine group: {error}")
            return None

    async def ask(self, engine_id: EngineId) -> EngineInfo:
        """Return the engine's info; from then on the engine waits for weights. Raises EngineError."""
        member = self.members[engine_id]
        info = await member.client.info()
        self._registry.answered(engine_id, url=member.client.url, version=info.version)
        return info

    async def end(self, engine_id: EngineId, reason: str) -> None:
        """Kill the engine unless it is attached, and remove it. Idempotent."""
        if (member := self.members.get(engine_id)) is not None:
            await member.handle.kill()
        self.members.pop(engine_id, None)
        if self._registry.stands(engine_id, *LIVING):
            self._registry.gone(engine_id, reason)

    async def stop_all(self) -> None:
        """Stop all engines that are not attached."""
        async with asyncio.TaskGroup() as tasks:
            for member in self.members.values():
                tasks.create_task(member.handle.stop())

    def statuses(self, now: float) -> tuple[EngineStatus, ...]:
        statuses = []
        for entry in self._registry.all():
            member = self.members.get(entry.engine_id)
            load = None if member is None else member.load
            statuses.append(
                EngineStatus(
                    engine_id=entry.engine_id,
                    origin=entry.origin,
                    place=entry.place,
                    state=entry.state,
                    url=entry.url,
                    version=None if entry.version is None else str(entry.version),
                    running=None if load is None else load.running,
                    waiting=None if load is None else load.waiting,
                    misses=entry.misses,
                    breaker=self._registry.breaker(entry.place).state(now),
                    reason=entry.reason,
                    process_id=None if member is None else member.process_id,
                )
            )
        return tuple(statuses)

    async def _start(self, place: str) -> EngineStartFailed | None:
        self.started += 1
        engine_id = EngineId(f"engine-{self.started}")
        origin = Origin.RAY if self._config.placement is Placement.RAY else Origin.LOCAL
        self._registry.starting(engine_id, place=place, origin=origin, now=time.monotonic())
        begin = self._start_placed if origin is Origin.RAY else self._start_local
        try:
            member = await begin(self._plan(engine_id, self.started, self._context.devices.get(place, ())))
            try:
                if not self._registry.stands(engine_id, EngineState.STARTING):
                    raise EngineGroupError(f"{engine_id} was removed while it was starting")
                self._registry.answered(engine_id, url=member.client.url, version=None)
            except EngineGroupError:
                await asyncio.shield(member.handle.kill())
                raise
            self.members[engine_id] = member
        except (EngineError, ActorError, EngineGroupError) as error:
            if self._registry.stands(engine_id, EngineState.STARTING):
                self._registry.failed(engine_id, f"it did not start: {error}", time.monotonic())
            return EngineStartFailed(str(error))
        except BaseException:
            if self._registry.stands(engine_id, EngineState.STARTING):
                self._registry.gone(engine_id, "its start was cancelled")
            raise
        return None

    async def _start_local(self, plan: ServerPlan) -> FleetMember:
        engine_id = EngineId(plan.name)
        process = server_process(self._config, plan)
        await process.start()
        client = self._client(engine_id, process.url)
        return FleetMember(engine_id, client, _LocalProcess(process), process_id=process.pid)

    async def _start_placed(self, plan: ServerPlan) -> FleetMember:
        runtime, config, engine_id = self._context.runtime, self._config, EngineId(plan.name)
        assert runtime is not None
        placed, avoided, coordinator = PlacedProcess(runtime), set(self.avoided), ""
        resources = Resources(
            cpus=config.cpus,
            gpus=config.gpus_per_node,
            memory_bytes=config.memory_bytes,
            role=NodeRole.ENGINE,
            spread=True,
            restarts=False,
        )
        try:
            for name in self._host_names(engine_id):
                host = await runtime.spawn(
                    EngineHost,
                    config,
                    replace(plan, name=name),
                    self._context.observing,
                    name=name,
                    resources=replace(resources, avoid=tuple(sorted(avoided))),
                )
                placed.hosts.append(host)
                node, free = await host.place()
                avoided.add(node)
                coordinator = coordinator or free
            async with asyncio.TaskGroup() as tasks:
                started = [tasks.create_task(host.start(rank, coordinator)) for rank, host in enumerate(placed.hosts)]
            return self._placed(engine_id, placed, [task.result() for task in started])
        except BaseException as error:
            await asyncio.shield(placed.kill())
            if isinstance(error, BaseExceptionGroup):
                raise first_cause(error) from error
            raise

    def _host_names(self, engine_id: EngineId) -> Sequence[str]:
        """Return the names of the actors of an engine, that of its head first."""
        return (engine_id, *(f"{engine_id}.{rank}" for rank in range(1, self._config.nodes)))

    def _plan(self, engine_id: EngineId, number: int, devices: tuple[str, ...]) -> ServerPlan:
        context = self._context
        return ServerPlan(
            name=engine_id,
            model_dir=context.model_dir,
            directory=context.directory,
            seed=context.seed * 1000 + number,
            group_timeout_s=context.push.engine_group_timeout_s,
            devices=devices,
            key_file=context.keys.own,
            weights=context.snapshots,
            traces_url=context.traces_url,
        )

    def _placed(self, engine_id: EngineId, process: PlacedProcess, hosted: Sequence[HostedEngine]) -> FleetMember:
        if len(hosted) < self._config.nodes:
            raise EngineUnavailable(f"{engine_id} has {len(hosted)} of {self._config.nodes} parts")
        for part in hosted:
            if part.node != node_address() and is_loopback(self._context.push.host):
                raise EngineStartFailed(
                    f"{engine_id} on {part.node} cannot reach push.host {self._context.push.host}: "
                    f"set push.host to {node_address()}"
                )
        nodes = tuple(part.node for part in hosted)
        return FleetMember(engine_id, self._client(engine_id, hosted[0].url), process, nodes)

    def _client(self, engine_id: EngineId, url: str, *, attached: bool = False) -> SGLangEngine:
        push = self._context.push
        config = SGLangConfig(
            vocab_size=self._vocab_size,
            foreign_version=NO_VERSION,
            control_timeout_s=push.client_phase_timeout_s,
            update_timeout_s=push.client_transfer_timeout_s,
            read_timeout_s=push.client_read_timeout_s,
        )
        key = self.keys.key_of(attached=attached)
        return SGLangEngine(engine_id, url, self._http, config, key=key)


def attached_id(url: str) -> EngineId:
    """Return the name of an attached server: its address."""
    host, port = address(url)
    return EngineId(f"{host}:{port}")


class EngineHandle(Protocol):
    """Handle of one engine."""

    async def is_alive(self) -> bool:
        """Return False if the engine can no longer answer. Returns within a bounded time."""

    async def stop(self) -> None:
        """Shut the engine down, unless it is attached. Idempotent."""

    async def kill(self) -> None:
        """End the engine immediately, unless it is attached. Idempotent."""


class _LocalProcess:
    """Engine process on this host."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    async def is_alive(self) -> bool:
        return self._process.alive

    async def stop(self) -> None:
        await self._process.stop()

    async def kill(self) -> None:
        await self._process.kill()


class PlacedProcess:
    """Engine behind Ray actors, one for each of its hosts."""

    def __init__(self, runtime: RayRuntime) -> None:
        self.hosts: list[EngineHost] = []
        self._runtime = runtime

    async def is_alive(self) -> bool:
        """Return False only if an actor is dead. A slow one counts as alive: the engine's health check decides."""
        try:
            async with asyncio.timeout(ASK_HOST_S):
                for host in self.hosts:
                    await host.address()
        except ActorLost:
            return False
        except TimeoutError:
            return True
        return True

    async def stop(self) -> None:
        await asyncio.gather(*(self._runtime.stop(host) for host in self.hosts))

    async def kill(self) -> None:
        await asyncio.gather(*(self._runtime.kill(host) for host in self.hosts))


class AttachedServer:
    """Attached server, which the group does not manage."""

    async def is_alive(self) -> bool:
        return True

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...
