"""An engine group over real engines and a real gateway: what the tests of the group stand on."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from headrace.actors.engines.config import EnginesConfig
from headrace.actors.engines.group import EngineGroup
from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.processes.engine_keys import EngineKeyFiles
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig
from headrace.policies.push.contract import PushConfig
from headrace.policies.push.machine import Phase, PushStep
from headrace.policies.sglang.client import SGLangEngine
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets, Sampling, SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.tracing.telemetry import TelemetryConfig

TINY = Path(__file__).resolve().parents[2] / "scripts" / "models" / "tiny"
GUARD_S = 60.0
"""How long a test waits for what must come, before it says that it hangs."""
SESSIONS = itertools.count()


def write_weights(directory: Path, seed: int) -> Path:
    """The tiny policy with weights of its own, whose answers hardly end before their limit."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINY, directory)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        noise = torch.randn(tensor.shape, generator=generator)
        scale = 0.3 if "embed" in name else tensor.shape[-1] ** -0.5
        tensors[name] = (1 + 0.1 * noise if tensor.ndim == 1 else noise * scale).to(tensor.dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "generation_config.json").write_text('{"eos_token_id": []}')
    return directory


def snapshot(model: Path, step: int) -> WeightsSnapshot:
    return WeightsSnapshot(version=PolicyVersion(1, step), shards=(WeightsShard.of(model / "model.safetensors"),))


def observing(folder: Path) -> ActorTelemetry:
    return ActorTelemetry(config=TelemetryConfig(enabled=False), run_dir=folder)


def gateway_of(model: Path, folder: Path, **settings: Any) -> GatewayActor:
    keys = EngineKeyFiles(own=folder / "engines" / "key")
    given = {"gate_wait_s": 30.0, "turn_timeout_s": 60.0, "engine_keys": keys, **settings}
    config = GatewayConfig(tokenizer_dir=model, **given)
    return GatewayActor(config, address_file=folder / "gateway.json", observing=observing(folder))


def make_group(model: Path, folder: Path, gateway: GatewayActor, push: dict[str, Any], **engines: Any) -> EngineGroup:
    config = EnginesConfig.model_validate({"max_context_tokens": 1024, "health_timeout_s": 5.0, **engines})
    push_config = PushConfig.model_validate({"bucket_bytes": 100_000, "phase_timeout_s": 10.0, **push})
    return EngineGroup(
        config,
        push_config,
        gateways=[gateway],
        metrics=observing(folder).metrics(),
        model_dir=model,
        seed=1,
        observing=observing(folder),
    )


def server(model: Path, folder: Path, name: str, key_file: Path | None = None) -> EngineProcess:
    """An engine that somebody else started."""
    return EngineProcess(
        EngineProcessConfig(
            model=model,
            directory=folder / "servers",
            weights=(folder,),
            key_file=key_file,
            name=name,
            max_context=1024,
            group_timeout_s=8.0,
        )
    )


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again and again."""
    async with asyncio.timeout(GUARD_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


async def until_running(client: SGLangEngine, count: int) -> None:
    """Wait until an engine itself says that so many requests run: what its group knows is older."""

    async def runs() -> bool:
        return (await client.load()).running >= count

    await until(runs)


@asynccontextmanager
async def servers(
    model: Path, folder: Path, *names: str, key_file: Path | None = None
) -> AsyncIterator[dict[str, EngineProcess]]:
    started = {name: server(model, folder, name, key_file) for name in names}
    async with AsyncExitStack() as stack:
        for process in started.values():
            stack.push_async_callback(process.stop)
        async with asyncio.TaskGroup() as tasks:
            for process in started.values():
                tasks.create_task(process.start())
        yield started


@dataclass
class Rig:
    """A group, its gateway and an agent's way to it."""

    group: EngineGroup
    client: GatewayClient
    http: aiohttp.ClientSession
    journal: list[tuple[int, str]] = field(default_factory=list)
    actions: dict[tuple[int, Phase], Callable[[], Awaitable[None]]] = field(default_factory=dict)
    step: int = 0

    async def engines(self) -> dict[str, EngineStatus]:
        """Those that are not gone, by name."""
        return {status.engine_id: status for status in await self.group.status() if status.state != "gone"}

    async def until(self, condition: Callable[[dict[str, EngineStatus]], bool]) -> dict[str, EngineStatus]:
        """Wait until the engines are like this."""
        try:
            async with asyncio.timeout(GUARD_S):
                while True:
                    engines = await self.engines()
                    if condition(engines):
                        return engines
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"it did not come to that: {await self.group.status()}") from None

    async def until_serving(self, count: int, version: str) -> dict[str, EngineStatus]:
        """Wait until so many engines, and no others, serve this version."""
        return await self.until(
            lambda engines: (
                [(engine.state, engine.version) for engine in engines.values()] == [("serving", version)] * count
            )
        )

    async def turn(self, tokens: int = 8) -> SessionReport:
        return await take_turn(self.client, self.http, tokens)

    async def push(self, model: Path, step: int) -> None:
        async with asyncio.timeout(GUARD_S):
            await self.group.push(snapshot(model, step), rollouts_in_flight=0)

    def before(self, wave: int, phase: Phase, action: Callable[[], Awaitable[None]]) -> None:
        """Do this, once, when that phase has been journalled."""
        self.actions[wave, phase] = action
        journal = self.group._journal
        write = type(journal).step

        async def hooked(push_id: str, step: PushStep) -> None:
            await write(journal, push_id, step)
            self.journal.append((step.wave, step.phase.value))
            if (now := self.actions.pop((step.wave, step.phase), None)) is not None:
                await now()

        journal.step = hooked  # type: ignore[method-assign]


async def take_turn(
    client: GatewayClient,
    http: aiohttp.ClientSession,
    tokens: int,
    *,
    text: str = "write alpha to a.txt",
    context_tokens: int = 1024,
) -> SessionReport:
    """One session of one turn, as an agent takes it."""
    session_id = SessionId(f"session-{next(SESSIONS)}")
    budgets = Budgets(max_tokens_per_turn=tokens, max_context_tokens=context_tokens)
    opened = await client.open(SessionSpec(session_id=session_id, sampling=Sampling(), budgets=budgets))
    body = {"messages": [{"role": "user", "content": text}]}
    async with http.post(f"{opened.base_url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()
    report = await client.finish(session_id)
    assert isinstance(report, SessionReport)
    return report


def versions_of(report: SessionReport) -> set[str]:
    """The weights that sampled a session."""
    assert report.trajectory is not None
    return {str(span.version) for row in report.trajectory.rows for span in row.versions}


def flags_of(report: SessionReport) -> list[tuple[str, bool]]:
    """The weights that sampled the one turn of a session, in their order, and whether on keys and values of others."""
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    return [(str(span.version), span.stale_kv) for span in row.versions]


@asynccontextmanager
async def open_group(
    model: Path,
    folder: Path,
    *,
    push: dict[str, Any] | None = None,
    gateway: dict[str, Any] | None = None,
    **engines: Any,
) -> AsyncIterator[Rig]:
    """A gateway and a group in this process."""
    if (key_file := engines.get("key_file")) is not None:
        keys = EngineKeyFiles(own=folder / "engines" / "key", attached=key_file)
        gateway = {"engine_keys": keys, **(gateway or {})}
    async with AsyncExitStack() as stack:
        actor = await stack.enter_async_context(gateway_of(model, folder, **(gateway or {})))
        group = await stack.enter_async_context(make_group(model, folder, actor, push or {}, **engines))
        address = await actor.address()
        client = await stack.enter_async_context(GatewayClient(address.url, address.admin_token))
        timeout = aiohttp.ClientTimeout(total=GUARD_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        yield Rig(group=group, client=client, http=http)


async def call(http: aiohttp.ClientSession, url: str, path: str, body: object | None = None) -> tuple[int, Any]:
    """Status and JSON of a plain call of an engine."""
    method = "GET" if body is None else "POST"
    async with http.request(method, url + path, json=body) as response:
        text = await response.text()
        return response.status, json.loads(text) if text.startswith(("{", "[")) else text


async def is_free(http: aiohttp.ClientSession, urls: Sequence[str]) -> bool:
    """None of these engines is paused or in a session."""
    for url in urls:
        ready, _ = await call(http, url, "/ready")
        began, _ = await call(http, url, "/begin_weight_update", {})
        ended, _ = await call(http, url, "/end_weight_update", {})
        if (ready, began, ended) != (200, 200, 200):
            return False
    return True
