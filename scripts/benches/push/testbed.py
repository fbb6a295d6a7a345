"""The testbed of the push bench: embedded engines behind a gateway's engine pool, and a sender.

Invariants:
- Turns go through `EnginePool`, and pushes close its gates: admission, waiting and continuation are real.
- All processes end with the context.
- The embedded engine can load the directory: fp32 weights, and the tiny policy's tokenizer.
- The width of the feed-forward layers is chosen so that the weights' size is within one per cent of the requested one.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp
from opentelemetry.trace import NoOpTracer

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, EngineId, GenerateRequest, RequestId
from headrace.policies.errors import PushError
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.models.qwen_config import QwenConfig
from headrace.policies.models.tiny import model_config, write_description
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig
from headrace.policies.push.contract import PushConfig, PushReport
from headrace.policies.push.directories import DirectoryReaders, SnapshotDirectories
from headrace.policies.push.execution import push
from headrace.policies.push.machine import PushStep
from headrace.policies.push.sender import SenderConfig, SenderProcess
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.capture.session_usage import UsageClock
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.engines import EnginePool
from headrace.serve.gateway.http.routing import EngineRoute, RoutingKey, RoutingTable

PROMPT_TOKENS = 4
TURN_DEADLINE_S = 600.0


HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 1024, 16, 4, 64
LAYER_BYTES = 64 * 1024 * 1024
FLOAT_BYTES = 4


def write_random_model(directory: Path, total_bytes: int) -> Path:
    """Write a model directory with about `total_bytes` of weights; return its model.safetensors."""
    import torch
    from safetensors.torch import save_file

    config = config_of(total_bytes)
    write_description(directory)
    keys = model_config() | config.model_dump()
    (directory / "config.json").write_text(json.dumps(keys))
    random = torch.Generator().manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape, generator=random) for name, shape in config.shapes().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory / "model.safetensors"


def config_of(total_bytes: int) -> QwenConfig:
    """Return the config with as many layers as fit, and the width that fills the remaining size."""
    layers = max(1, round(total_bytes / LAYER_BYTES))

    def config(wide: int) -> QwenConfig:
        keys = model_config() | {
            "hidden_size": HIDDEN,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_VALUE_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": wide,
        }
        return QwenConfig.from_keys(keys, source="random model")

    def size(wide: int) -> int:
        return sum(math.prod(shape) for shape in config(wide).shapes().values()) * FLOAT_BYTES

    per_unit = size(2) - size(1)
    return config(max(1, round((total_bytes - size(1)) / per_unit) + 1))


class PoolGate:
    """Gates of one gateway's engines."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        self._pool.close_gate(engine_id, lease_s)

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> Sequence[RequestId]:
        """Open the engine's gate. Returns no aborts to repeat: the pool repeats them itself."""
        await self._pool.open_gate(engine_id, cache_namespace)
        return ()


@dataclass(slots=True, kw_only=True)
class PushTestbed:
    """Engines, their pool for turns, and the sender; `sampled_tokens` counts the tokens of all turns so far."""

    engines: tuple[SGLangEngine, ...]
    pool: EnginePool
    sender: SenderProcess
    directories: SnapshotDirectories
    shard: WeightsShard
    sampled_tokens: int = 0
    _versions: count[int] = field(default_factory=lambda: count(1))
    _turns: count[int] = field(default_factory=count)

    async def push(self, config: PushConfig) -> PushReport:
        """Push the same weights as the next version. Raises PushError when an engine was not updated."""
        snapshot = WeightsSnapshot(version=PolicyVersion(1, next(self._versions)), shards=(self.shard,))
        report = await push(
            snapshot,
            self.engines,
            self.sender,
            PoolGate(self.pool),
            _no_journal,
            config,
            directories=self.directories,
        )
        if len(report.updated) != len(self.engines):
            raise PushError(f"not every engine was updated: {report.engines}")
        return report

    @asynccontextmanager
    async def busy(self, agents: int, max_new_tokens: int) -> AsyncIterator[None]:
        """Run agents that take one turn after another, and one that hangs forever without taking a turn."""
        async with asyncio.TaskGroup() as tasks:
            running: list[asyncio.Task[object]] = [
                tasks.create_task(self._agent(max_new_tokens)) for _ in range(agents)
            ]
            running.append(tasks.create_task(asyncio.Event().wait()))
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    async def until_in_flight(self, turns: int) -> None:
        """Wait until the engines have this number of requests in total."""
        while True:
            loads = [await engine.load() for engine in self.engines]
            if sum(load.running + load.waiting for load in loads) >= turns:
                return

    async def _agent(self, max_new_tokens: int) -> None:
        while True:
            number = next(self._turns)
            pieces: list[Completion] = []
            ask = GenerateRequest(
                request_id=RequestId(f"turn-{number}"),
                input_ids=tuple((number + 7 * at) % 256 for at in range(PROMPT_TOKENS)),
                max_new_tokens=max_new_tokens,
            )
            whole = await self.pool.sample(RoutingKey(SessionId(str(number))), ask, pieces, UsageClock(since_s=0.0))
            self.sampled_tokens += len(whole.output_ids)


@asynccontextmanager
async def open_testbed(
    model: Path, folder: Path, *, engines: int, max_running: int, max_context: int
) -> AsyncIterator[PushTestbed]:
    """Start engines for a model directory, and a sender of its weights."""
    vocab_size = QwenConfig.read(model / "config.json").vocab_size
    async with AsyncExitStack() as stack:
        config = EngineProcessConfig(
            model=model, directory=folder, weights=(folder,), max_running=max_running, max_context=max_context
        )
        processes = [
            EngineProcess(config.model_copy(update={"name": f"engine-{at}", "seed": at})) for at in range(engines)
        ]
        for process in processes:
            stack.push_async_callback(process.stop)
        async with asyncio.TaskGroup() as tasks:
            for process in processes:
                tasks.create_task(process.start())
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        client = SGLangConfig(
            vocab_size=vocab_size, generate_timeout_s=TURN_DEADLINE_S, control_timeout_s=60.0, read_timeout_s=120.0
        )
        clients = tuple(
            SGLangEngine(EngineId(f"engine-{at}"), process.url, session, client) for at, process in enumerate(processes)
        )
        yield PushTestbed(
            engines=clients,
            pool=await stack.enter_async_context(pool_over(clients)),
            sender=await stack.enter_async_context(SenderProcess(SenderConfig())),
            directories=SnapshotDirectories(folder / "directories", model, DirectoryReaders()),
            shard=await asyncio.to_thread(WeightsShard.of, model / "model.safetensors"),
        )


@asynccontextmanager
async def pool_over(clients: Sequence[SGLangEngine]) -> AsyncIterator[EnginePool]:
    """Open a gateway's engine pool for these engines."""
    by_id = {client.engine_id: client for client in clients}
    config = GatewayConfig(gate_wait_s=TURN_DEADLINE_S, turn_timeout_s=TURN_DEADLINE_S)
    pool = EnginePool(config, lambda route: by_id[route.engine_id], time.monotonic, NoOpTracer())
    routes = tuple(EngineRoute(engine_id=client.engine_id, url=client.url) for client in clients)
    await pool.replace_table(RoutingTable(version=1, engines=routes))
    try:
        yield pool
    finally:
        await pool.aclose()


async def _no_journal(push_id: str, step: PushStep) -> None:
    """Record nothing, since these pushes are never resumed."""
