"""What stands behind an engine: a process of ours, an actor on some host, or somebody else's server.

Invariants:
- A body that is ours dies with what started it, also under kill -9; `kill` ends it at once, `stop` lets it close.
- Somebody else's server is never ended: to us it lives as long as it answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace.actors.errors import ActorLost
from headrace.policies.engine_process import EngineProcess, EngineProcessConfig
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.actors.engine_group.config import EnginesConfig
    from headrace.actors.engine_group.host import EngineHost
    from headrace.actors.runtime import RayRuntime
    from headrace.policies.server_process import ServerProcess

ASK_HOST_S = 10.0
"""How long an engine's actor may take to say that it lives."""


class Body(Protocol):
    """One engine's."""

    async def is_alive(self) -> bool:
        """Whether it may still answer; bounded."""
        ...

    async def stop(self) -> None:
        """End it; nothing for what is not ours. Idempotent."""
        ...

    async def kill(self) -> None:
        """End it at once; nothing for what is not ours. Idempotent."""
        ...


class OwnProcess:
    """A process on this host."""

    def __init__(self, process: ServerProcess) -> None:
        self._process = process

    async def is_alive(self) -> bool:
        return self._process.alive

    async def stop(self) -> None:
        await self._process.stop()

    async def kill(self) -> None:
        await self._process.kill()


class PlacedProcess:
    """A process behind an actor, wherever that is."""

    def __init__(self, host: EngineHost, runtime: RayRuntime) -> None:
        self._host = host
        self._runtime = runtime

    async def is_alive(self) -> bool:
        """An actor that is slow to say so lives: its engine is asked itself."""
        try:
            async with asyncio.timeout(ASK_HOST_S):
                await self._host.address()
        except ActorLost:
            return False
        except TimeoutError:
            return True
        return True

    async def stop(self) -> None:
        await self._runtime.stop(self._host)

    async def kill(self) -> None:
        await self._runtime.kill(self._host)


class ForeignServer:
    """Somebody else's."""

    async def is_alive(self) -> bool:
        return True

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One engine that is to be started: it binds to `host`, and its files in `directory` have the stem `name`.
    `group_timeout_s` bounds the formation of a weight group, and the transfer of a bucket, at the engine's end."""

    name: str
    model_dir: Path
    directory: Path
    seed: int
    group_timeout_s: float
    host: str = "127.0.0.1"


def server_process(config: EnginesConfig, plan: ServerPlan) -> ServerProcess:
    """The process of one engine, not yet started."""
    return _sglang(config, plan) if config.backend == "sglang" else _embedded(config, plan)


def _embedded(config: EnginesConfig, plan: ServerPlan) -> ServerProcess:
    return EngineProcess(
        EngineProcessConfig(
            model=plan.model_dir,
            directory=plan.directory,
            host=plan.host,
            name=plan.name,
            seed=plan.seed,
            max_running=config.max_running,
            max_context=config.max_context_tokens,
            group_timeout_s=plan.group_timeout_s,
            start_timeout_s=config.start_timeout_s,
        )
    )


def _sglang(config: EnginesConfig, plan: ServerPlan) -> ServerProcess:
    return SGLangProcess(
        SGLangServerConfig(
            model=plan.model_dir,
            directory=plan.directory,
            python=config.sglang.python,
            device=config.device,
            name=plan.name,
            host=plan.host,
            seed=plan.seed,
            max_running=config.max_running,
            max_context=config.max_context_tokens,
            tensor_parallel=config.tensor_parallel,
            dtype=config.dtype,
            arguments=config.sglang.arguments,
            start_timeout_s=config.start_timeout_s,
        )
    )
