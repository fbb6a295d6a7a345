"""Ray actor that hosts one engine process: all of an engine, or its part on one of several hosts.

Invariants:
- The process dies with the actor, and the actor with the process; Ray restarts neither.
- The engine listens on the address at which other hosts reach its host.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

from headrace.actors.runtime.actors.nodes import this_node
from headrace.actors.runtime.actors.runtime import node_address
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.policies.errors import EngineUnavailable
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig, ServerProcess
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig, free_port, reachable
from headrace.serve.tracing.otlp_server import otlp_server

if TYPE_CHECKING:
    from headrace.actors.engines.config import EnginesConfig
    from headrace.actors.record.files.actor_telemetry import ActorTelemetry
    from headrace.serve.tracing.telemetry import TelemetryHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class HostedEngine:
    """Location of a hosted engine; `process_id` is valid on its own host."""

    url: str
    process_id: int
    node: str


class EngineHost(ResourceOwner):
    """Starts one engine process on this actor's host, when told to. The plan's paths must be the same on every host."""

    def __init__(self, config: EnginesConfig, plan: ServerPlan, observing: ActorTelemetry) -> None:
        super().__init__()
        self._config = config
        self._plan = plan
        self._observing = observing
        self._process: ServerProcess | None = None

    async def __aenter__(self) -> Self:
        self._node = node_address()
        if self._config.sglang.traces:
            tracing = self._stack.enter_context(self._observing.spans(self._plan.name))
            url = await self._stack.enter_async_context(receiver_of(self._config, tracing))
            self._plan = replace(self._plan, traces_url=url)
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        return self

    async def place(self) -> tuple[str, str]:
        """Return the Ray id of this actor's node, and an address there at which nothing listens yet."""
        return this_node(), f"{reachable(self._node)}:{free_port(self._node)}"

    async def start(self, rank: int, coordinator: str) -> HostedEngine:
        """Start the process, of this rank among those of the engine, which meet at `coordinator`, and wait until it
        answers. Raises EngineStartFailed."""
        plan = replace(self._plan, host=self._node, rank=rank, coordinator=coordinator)
        process = server_process(self._config, plan)
        await process.start()
        self._process = process
        self._stack.push_async_callback(process.stop)
        self._stack.callback(self._tasks.create_task(_end_with(process)).cancel)
        return await self.address()

    async def address(self) -> HostedEngine:
        """Return where the process is. Raises EngineUnavailable if it has not been started."""
        if self._process is None:
            raise EngineUnavailable(f"{self._plan.name} has not been started")
        return HostedEngine(url=self._process.url, process_id=self._process.pid, node=self._node)


async def _end_with(process: ServerProcess) -> NoReturn:
    """Break the actor's context as soon as the engine ends."""
    code = await process.wait()
    raise EngineUnavailable(f"the engine process ended with {code}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Parameters of an engine to start. It binds to `host`, and its files in `directory` have the stem `name`.
    `group_timeout_s` bounds the formation of a weight group, and the transfer of a bucket, on the engine's side.
    `devices` are its CUDA devices; if empty, it sees those of its parent. `key_file` has its key, and `weights` are the
    folders from which an embedded engine loads weights. SGLang sends its spans to `traces_url`, if there is one. Of an
    engine on several hosts this is the process with the number `rank`, and they meet at `coordinator`."""

    name: str
    model_dir: Path
    directory: Path
    seed: int
    group_timeout_s: float
    host: str = "127.0.0.1"
    devices: tuple[str, ...] = ()
    key_file: Path | None = None
    weights: tuple[Path, ...] = ()
    traces_url: str = ""
    rank: int = 0
    coordinator: str = ""


@asynccontextmanager
async def receiver_of(config: EnginesConfig, tracing: TelemetryHandle) -> AsyncIterator[str]:
    """Take the spans of engines on this host, if the recipe wants them; yield the receiver's URL, or ""."""
    intake = tracing.intake() if config.backend == "sglang" and config.sglang.traces else None
    if intake is None:
        yield ""
        return
    async with otlp_server(intake) as url:
        yield url


def server_process(config: EnginesConfig, plan: ServerPlan) -> ServerProcess:
    """Return the process of one engine, not yet started."""
    if config.backend == "sglang":
        return SGLangProcess(
            SGLangServerConfig(
                model=plan.model_dir,
                directory=plan.directory,
                python=config.sglang.python,
                device=config.device,
                devices=plan.devices,
                name=plan.name,
                host=plan.host,
                key_file=plan.key_file,
                seed=plan.seed,
                max_running=config.max_running,
                max_context=config.max_context_tokens,
                tensor_parallel=config.tensor_parallel,
                nodes=config.nodes,
                rank=plan.rank,
                coordinator=plan.coordinator,
                data_parallel=config.data_parallel,
                expert_parallel=config.expert_parallel,
                environment=config.sglang.environment,
                dtype=config.dtype,
                report_times=config.sglang.report_times,
                traces_url=plan.traces_url,
                arguments=config.sglang.arguments,
                start_timeout_s=config.start_timeout_s,
            )
        )
    return EngineProcess(
        EngineProcessConfig(
            model=plan.model_dir,
            directory=plan.directory,
            host=plan.host,
            key_file=plan.key_file,
            weights=plan.weights,
            name=plan.name,
            seed=plan.seed,
            max_running=config.max_running,
            max_context=config.max_context_tokens,
            group_timeout_s=plan.group_timeout_s,
            start_timeout_s=config.start_timeout_s,
        )
    )
