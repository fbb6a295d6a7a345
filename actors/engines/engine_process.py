"""Handles of engine processes: a local process, a process behind a Ray actor, or an attached server.

Invariants:
- A process that we started dies with its parent, even if the parent is killed with SIGKILL. `kill` ends it immediately,
  `stop` lets it shut down.
- An attached server is never ended, and counts as alive as long as it answers.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from headrace.actors.engines.host import EngineHost
from headrace.actors.errors import ActorLost
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.policies.processes.server_process import ServerProcess

ASK_HOST_S = 10.0
"""Time limit for an engine's actor to report that it is alive."""


class EngineHandle(Protocol):
    """Handle of one engine."""

    async def is_alive(self) -> bool:
        """Return False if the engine can no longer answer. Returns within a bounded time."""
        ...

    async def stop(self) -> None:
        """Shut the engine down, unless it is attached. Idempotent."""
        ...

    async def kill(self) -> None:
        """End the engine immediately, unless it is attached. Idempotent."""
        ...


class LocalProcess:
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
    """Engine process behind a Ray actor."""

    def __init__(self, host: EngineHost, runtime: RayRuntime) -> None:
        self._host = host
        self._runtime = runtime

    async def is_alive(self) -> bool:
        """Return False only if the actor is dead. A slow actor counts as alive: the engine's health check decides."""
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


class AttachedServer:
    """Attached server, which the group does not manage."""

    async def is_alive(self) -> bool:
        return True

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...
