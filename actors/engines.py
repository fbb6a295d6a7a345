"""The engine group: who is healthy, who holds which version; it alone runs the control sequence of a push.

Invariants:
- One push at a time. An engine gets traffic only while it is healthy and holds the newest version that was pushed to
  it completely.
- An engine that failed a push or died is taken out of routing, replaced by a new process, and caught up before it
  gets traffic.
- An engine that answers nothing for `health_timeout_s` is dead to us: it is killed, so that its turns go elsewhere. So
  is one that answers, and leaves turn after turn without an end.
- A dead sender costs a push nothing but time: what it did not reach is pushed again by the next one.
- The newest snapshot is journalled before its push begins: a restarted group brings its new engines to it before
  anything else.
- Routing tables are versioned and published again and again: a restarted gateway has one within a supervision interval.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import aiohttp
import orjson
from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.errors import ActorLost
from headrace.actors.gateway import write_private
from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.engine_process import EngineProcess, EngineProcessConfig
from headrace.policies.errors import EngineError, EngineStartFailed, EngineUnavailable, PolicyError, SenderFailed
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.push.execution import push
from headrace.policies.push.machine import PushOutcome
from headrace.policies.push.sender import SenderConfig, SenderProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.policies.simulated import SimulatedEnginesConfig
from headrace.serve.routing import EngineRoute, RoutingTable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from types import TracebackType

    from headrace.actors.gateway import GatewayActor
    from headrace.actors.observing import Observing
    from headrace.policies.engine import RequestId
    from headrace.policies.push.contract import PushConfig, PushReport
    from headrace.policies.push.machine import Step

logger = logging.getLogger(__name__)

SUPERVISION_S = 2.0
SILENT_CALLS = 8
"""Turns in a row that an engine left without an answer: it tells its load and generates nothing."""
GATEWAY_TIMEOUT_S = 5.0
"""A gateway that is silent for so long must not be taken for a failing engine: below every deadline of a push."""


class EnginesConfig(BaseModel):
    """The inference engines of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["cpu", "simulated"] = "cpu"
    """`cpu` is the embedded engine; `simulated` takes time instead of computing, for the simulated agent and learner.
    SGLang servers are not started by this version."""
    simulated: SimulatedEnginesConfig = SimulatedEnginesConfig()
    """Settings of simulated engines."""
    count: int = Field(default=2, ge=1)
    """Engine processes."""
    max_running: int = Field(default=64, ge=1)
    """Sequences one engine decodes at once."""
    max_context_tokens: int | None = Field(default=None, ge=16)
    """Prompt and answer together; None takes sampling.max_context_tokens."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """From start to the first answer; importing torch takes seconds."""
    health_timeout_s: float = Field(default=10.0, gt=0)
    """An engine that does not tell its load for so long is killed and replaced."""

    @property
    def is_simulated(self) -> bool:
        """No engine, gateway or weights: turns take time."""
        return self.backend == "simulated"


@dataclass(slots=True)
class _Member:
    """One engine of the group."""

    engine_id: EngineId
    process: EngineProcess
    client: SGLangEngine
    admitted: bool = False
    version: PolicyVersion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    engine_id: EngineId
    url: str
    process_id: int
    admitted: bool
    version: PolicyVersion | None


class EngineGroup:
    """Starts, watches and replaces the engines, and pushes weights into them."""

    def __init__(
        self,
        config: EnginesConfig,
        push_config: PushConfig,
        *,
        gateway: GatewayActor,
        model_dir: Path,
        seed: int,
        observing: Observing,
    ) -> None:
        self._config = config
        self._push_config = push_config
        self._gateway = gateway
        self._model_dir = model_dir
        self._seed = seed
        self._observing = observing
        if observing.run_dir is None:
            raise ValueError("engines keep logs and journals: they need a run directory")
        self._directory = observing.run_dir / "engines"
        self._stack = AsyncExitStack()
        self._members: dict[EngineId, _Member] = {}
        self._pushing = asyncio.Lock()
        self._started = 0

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._observing.spans("engines"))
        self._metrics = self._observing.metrics()
        self._vocab_size = json.loads((self._model_dir / "config.json").read_bytes())["vocab_size"]
        self._directory.mkdir(parents=True, exist_ok=True)
        self._stack.push_async_callback(self._stop_engines)
        try:
            self._http = await self._stack.enter_async_context(aiohttp.ClientSession())
            self._senders: list[SenderProcess] = []
            first = self._add_sender()
            async with asyncio.TaskGroup() as starting:
                starting.create_task(first.__aenter__())
                starting.create_task(self._start_missing())
            await self._catch_up(list(self._members.values()))
            tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
            self._supervision = tasks.create_task(self._supervise())
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._supervision.cancel()
        await self._stack.aclose()

    async def push(self, snapshot: WeightsSnapshot, *, rollouts_in_flight: int) -> None:
        """Send these weights to every engine, wave by wave; when none takes them, to new engines. `rollouts_in_flight`
        is what runs as the push begins, for the record.

        Nothing is done for a snapshot of an earlier epoch than the newest one: its learner is dead. Raises
        EngineUnavailable when no engine took the weights, ModelInvalid, SenderFailed.
        """
        async with self._pushing:
            newest = self._newest_snapshot()
            if newest is not None and snapshot.version.epoch < newest.version.epoch:
                return
            self._journal_snapshot(snapshot)
            await self._push_to(list(self._members.values()), snapshot, rollouts_in_flight)
            if not self._serving(snapshot):
                await self._remove(list(self._members.values()))
                await self._catch_up(await self._start_missing())
            await self._publish()
            if not self._serving(snapshot):
                raise EngineUnavailable(f"no engine, old or new, took version {snapshot.version}: see engines/*.log")

    async def status(self) -> list[EngineStatus]:
        return [
            EngineStatus(
                engine_id=member.engine_id,
                url=member.client.url,
                process_id=member.process.pid,
                admitted=member.admitted,
                version=member.version,
            )
            for member in self._members.values()
        ]

    def _serving(self, snapshot: WeightsSnapshot) -> bool:
        return any(member.admitted and member.version == snapshot.version for member in self._members.values())

    async def _push_to(
        self, members: Sequence[_Member], snapshot: WeightsSnapshot, rollouts_in_flight: int | None = None
    ) -> None:
        """Push, and push once more to those a dying sender left behind."""
        report = await self._push_once(members, snapshot)
        self._record(report, rollouts_in_flight)
        behind = {item.engine_id for item in report.engines if item.outcome is PushOutcome.BEHIND}
        if behind:
            again = [member for member in members if member.engine_id in behind]
            self._record(await self._push_once(again, snapshot), rollouts_in_flight)

    async def _push_once(self, members: Sequence[_Member], snapshot: WeightsSnapshot) -> PushReport:
        report = await self._through_sender(members, snapshot)
        for member in members:
            member.admitted = member.engine_id in report.updated
            member.version = snapshot.version if member.admitted else member.version
        return report

    async def _through_sender(self, members: Sequence[_Member], snapshot: WeightsSnapshot) -> PushReport:
        """A push whose sender died before anything was touched is begun again, once."""
        arguments = (
            snapshot,
            [member.client for member in members],
            self._senders_for(snapshot),
            _GatewayGate(self._gateway),
            self._journal_step,
            self._push_config,
        )
        try:
            return await push(*arguments)
        except SenderFailed as error:
            logger.warning("the push of %s starts again: %s", snapshot.version, error)
            return await push(*arguments)

    def _senders_for(self, snapshot: WeightsSnapshot) -> list[SenderProcess]:
        """One for each shard; a further one starts with its first command."""
        while len(self._senders) < len(snapshot.shards):
            self._add_sender()
        return self._senders[: len(snapshot.shards)]

    def _add_sender(self) -> SenderProcess:
        sender = SenderProcess(SenderConfig(log_path=self._directory / "sender.log"))
        self._senders.append(sender)
        self._stack.push_async_callback(sender.kill)
        return sender

    async def _journal_step(self, push_id: str, step: Step) -> None:
        record = {"push_id": push_id, "wave": step.wave, "phase": step.phase, "engines": step.engines}
        line = orjson.dumps({**record, "time_s": time.time()}) + b"\n"
        with (self._directory / "pushes.jsonl").open("ab", buffering=0) as file:
            file.write(line)

    def _journal_snapshot(self, snapshot: WeightsSnapshot) -> None:
        shards = [{"path": str(shard.path), "sha256": shard.sha256} for shard in snapshot.shards]
        record = {"version": str(snapshot.version), "shards": shards}
        write_private(self._directory / "newest.json", orjson.dumps(record))

    def _newest_snapshot(self) -> WeightsSnapshot | None:
        """The journalled snapshot, if its files are still there."""
        journal = self._directory / "newest.json"
        if not journal.exists():
            return None
        record = orjson.loads(journal.read_bytes())
        # Journals of the first versions know one file only.
        given = record.get("shards", [record])
        shards = tuple(WeightsShard(path=Path(shard["path"]), sha256=shard["sha256"]) for shard in given)
        if not all(shard.path.exists() for shard in shards):
            return None
        return WeightsSnapshot(version=PolicyVersion.parse(record["version"]), shards=shards)

    async def _catch_up(self, members: list[_Member]) -> None:
        """Bring new engines to the newest version; without one they wait for the first push."""
        snapshot = self._newest_snapshot()
        if snapshot is not None and members:
            await self._push_to(members, snapshot)
        await self._publish()

    async def _start_missing(self) -> list[_Member]:
        """Start as many engines as are missing; those that started. Raises EngineStartFailed when none is left."""
        async with asyncio.TaskGroup() as tasks:
            starting = [tasks.create_task(self._try_to_start()) for _ in range(self._config.count - len(self._members))]
        results = [task.result() for task in starting]
        started = [result for result in results if isinstance(result, _Member)]
        self._members |= {member.engine_id: member for member in started}
        failures = [result for result in results if isinstance(result, EngineStartFailed)]
        for failure in failures:
            logger.warning("an engine did not start; tried again by the supervision: %s", failure)
        if failures and not self._members:
            raise failures[0]
        return started

    async def _try_to_start(self) -> _Member | EngineStartFailed:
        try:
            return await self._start_engine()
        except EngineStartFailed as error:
            return error

    async def _start_engine(self) -> _Member:
        self._started += 1
        engine_id = EngineId(f"engine-{self._started}")
        process = EngineProcess(
            EngineProcessConfig(
                model=self._model_dir,
                directory=self._directory,
                name=engine_id,
                seed=self._seed * 1000 + self._started,
                max_running=self._config.max_running,
                max_context=self._config.max_context_tokens,
                start_timeout_s=self._config.start_timeout_s,
            )
        )
        await process.start()
        client = SGLangEngine(engine_id, process.url, self._http, SGLangConfig(vocab_size=self._vocab_size))
        return _Member(engine_id, process, client)

    async def _stop_engines(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for member in self._members.values():
                tasks.create_task(member.process.stop())

    async def _publish(self) -> None:
        """Tell the gateway who is in routing. A gateway that is restarting hears it again from the supervision."""
        routes = tuple(
            EngineRoute(engine_id=member.engine_id, url=member.client.url, admitted=member.admitted)
            for member in self._members.values()
        )
        # Milliseconds of the clock: larger than any table of an earlier incarnation of this group.
        table = RoutingTable(version=time.time_ns() // 1_000_000, engines=routes)
        await _tell_gateway(self._gateway.set_engines(table))

    async def _supervise(self) -> None:
        """Replace what died, hangs or was quarantined; keep the gateway's table fresh."""
        while True:
            await asyncio.sleep(SUPERVISION_S)
            # Killed before the lock is taken: a push that waits for a hung engine ends by that.
            failed = await self._kill_failed()
            async with self._pushing:
                await self._remove(failed)
                await self._publish()
                if len(self._members) < self._config.count:
                    await self._refill()

    async def _kill_failed(self) -> list[_Member]:
        members = list(self._members.values())
        silent = await self._silent()
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(self._failed(member)) for member in members]
        failed = [
            member
            for member, answer in zip(members, asked, strict=True)
            if answer.result() or member.engine_id in silent
        ]
        for member in failed:
            logger.warning("replacing engine %s (alive: %s)", member.engine_id, member.process.alive)
            await member.process.kill()
        return failed

    async def _silent(self) -> set[str]:
        """Engines that generate nothing any more, as the gateway sees it. During a push they may have to be silent."""
        if self._pushing.locked():
            return set()
        try:
            async with asyncio.timeout(GATEWAY_TIMEOUT_S):
                stats = await self._gateway.stats()
        except (ActorLost, TimeoutError):
            return set()
        return {engine for engine, calls in stats.silent.items() if calls >= SILENT_CALLS}

    async def _failed(self, member: _Member) -> bool:
        """Dead, hung, or left out by a push that is over."""
        if not member.process.alive:
            return True
        if not self._pushing.locked() and not member.admitted and self._newest_snapshot() is not None:
            return True
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                await member.client.load()
        except (EngineError, TimeoutError):
            return True
        return False

    async def _remove(self, members: Sequence[_Member]) -> None:
        for member in members:
            self._members.pop(member.engine_id, None)
            await member.process.kill()

    async def _refill(self) -> None:
        try:
            await self._catch_up(await self._start_missing())
        except PolicyError:
            logger.exception("engines could not be replaced; tried again at the next supervision")

    def _record(self, report: PushReport, rollouts_in_flight: int | None) -> None:
        self._metrics.append(
            "push",
            {
                "push_id": report.push_id,
                "version": str(report.version),
                "total_s": report.total_s,
                "seconds": report.seconds,
                "sent_bytes": report.sent_bytes,
                "rollouts_in_flight": rollouts_in_flight,
                "requests_in_flight": sum(item.in_flight for item in report.engines),
                "paused_s": [item.paused_s for item in report.engines],
                "updated": list(report.updated),
                "quarantined": list(report.quarantined),
            },
        )


class _GatewayGate:
    """Admission at the gateway actor; a gateway that is gone or hangs admits nothing, so there is nothing to close."""

    def __init__(self, gateway: GatewayActor) -> None:
        self._gateway = gateway

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        await _tell_gateway(self._gateway.close_gate(engine_id, lease_s))

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> Sequence[RequestId]:
        await _tell_gateway(self._gateway.open_gate(engine_id, cache_namespace))
        return ()


async def _tell_gateway(call: Awaitable[object]) -> None:
    """Await a call of the gateway; one that is gone, hangs or does not come up is told nothing."""
    try:
        async with asyncio.timeout(GATEWAY_TIMEOUT_S):
            await call
    except (ActorLost, TimeoutError):
        pass
    except Exception:
        logger.exception("the gateway could not be told")
