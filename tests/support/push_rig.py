"""Real engines, mostly two, a sender and gates that only count: what the tests of a push stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, EngineId, GenerateRequest, RequestId
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.models.model_files import weight_files
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig
from headrace.policies.push.contract import Gate, PushConfig, PushReport, Trainer
from headrace.policies.push.directories import DirectoryReaders, SnapshotDirectories
from headrace.policies.push.execution import push
from headrace.policies.push.machine import Phase, PushStep
from headrace.policies.push.sender import SenderConfig, SenderProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine

VOCABULARY = 258
NAMES = ("one", "two")
TIMEOUT_S = 8.0
"""Of the engines' groups: longer than a name server that lost a query holds one up, five seconds now and then."""


@dataclass
class RecordingGate:
    """A gate over nothing: it remembers who is closed, and which aborts to send again."""

    closed: dict[str, float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    aborts: list[RequestId] = field(default_factory=list)
    namespaces: dict[str, str | None] = field(default_factory=dict)

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        self.closed[engine_id] = lease_s
        self.log.append(f"close {engine_id}")

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> list[RequestId]:
        self.closed.pop(engine_id, None)
        self.namespaces[engine_id] = cache_namespace
        self.log.append(f"open {engine_id}")
        return self.aborts


@dataclass
class Rig:
    """`push` pushes a model directory as `1.<step>` to both engines, each shard of a snapshot through a sender."""

    processes: dict[str, EngineProcess]
    engines: dict[str, SGLangEngine]
    sender: SenderProcess
    session: aiohttp.ClientSession
    directories: SnapshotDirectories | None = None
    gate: RecordingGate = field(default_factory=RecordingGate)
    journal: list[tuple[int, str]] = field(default_factory=list)

    def attach(self, name: str, *, in_place: bool = False) -> None:
        """A client of the process of this name, as it is now."""
        config = SGLangConfig(vocab_size=VOCABULARY, in_place=in_place)
        self.engines[name] = SGLangEngine(EngineId(name), self.processes[name].url, self.session, config)

    async def replace(self, name: str) -> None:
        """A fresh process in the place of a broken one."""
        await self.processes[name].kill()
        await self.processes[name].start()
        self.attach(name)

    async def push(
        self,
        directory: Path,
        step: int,
        *,
        before: Callable[[int, Phase], Awaitable[None]] | None = None,
        **config: Any,
    ) -> PushReport:
        """Push a model directory; `before` is awaited before each phase of a wave."""
        return await self.push_snapshot(snapshot(directory, step), before=before, **config)

    async def push_snapshot(
        self,
        weights: WeightsSnapshot,
        *,
        before: Callable[[int, Phase], Awaitable[None]] | None = None,
        gate: Gate | None = None,
        trainer: Trainer | None = None,
        backend: str = "",
        **config: object,
    ) -> PushReport:
        async def journal(push_id: str, step: PushStep) -> None:
            self.journal.append((step.wave, step.phase.value))
            if before is not None:
                await before(step.wave, step.phase)

        given = PushConfig.model_validate({"bucket_bytes": 200_000, "phase_timeout_s": 5.0, **config})
        if backend:
            # Not one that a recipe may name.
            given = given.model_copy(update={"backend": backend})
        engines, gates = list(self.engines.values()), gate or self.gate
        return await push(
            weights, engines, self.sender, gates, journal, given, directories=self.directories, trainer=trainer
        )

    async def generate(self, name: str, request_id: str, tokens: int, namespace: str | None = None) -> Completion:
        request = GenerateRequest(
            request_id=RequestId(request_id),
            input_ids=(5, 6, 7),
            max_new_tokens=tokens,
            temperature=1.0,
            cache_namespace=namespace,
        )
        return await self.engines[name].generate(request)

    async def until_busy(self, name: str, running: int) -> None:
        async with asyncio.timeout(30):
            while (await self.engines[name].load()).running < running:
                pass


def snapshot(directory: Path, step: int) -> WeightsSnapshot:
    """The weights of a model directory as version `1.<step>`."""
    shards = tuple(WeightsShard.of(path) for path in weight_files(directory))
    return WeightsSnapshot(version=PolicyVersion(1, step), shards=shards)


@asynccontextmanager
async def open_rig(model: Path, directory: Path, names: Sequence[str] = NAMES) -> AsyncIterator[Rig]:
    """Start everything; end everything."""
    configs = {
        name: EngineProcessConfig(
            model=model, directory=directory, weights=(directory,), name=name, seed=seed, group_timeout_s=TIMEOUT_S
        )
        for seed, name in enumerate(names)
    }
    processes = {name: EngineProcess(config) for name, config in configs.items()}
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        for process in processes.values():
            stack.push_async_callback(process.stop)
        sender = SenderProcess(SenderConfig(log_path=directory / "sender.log"))
        async with asyncio.TaskGroup() as tasks:
            for process in processes.values():
                tasks.create_task(process.start())
            tasks.create_task(stack.enter_async_context(sender))
        directories = SnapshotDirectories(directory / "weights", model, DirectoryReaders())
        rig = Rig(processes=processes, engines={}, sender=sender, session=session, directories=directories)
        for name in names:
            rig.attach(name)
        yield rig
