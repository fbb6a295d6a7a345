"""What stands behind an engine: a process of ours, an actor on some host, or somebody else's server.

Invariants:
- A body that is ours dies with what started it, also under kill -9; `kill` ends it at once, `stop` lets it close.
- Somebody else's server is never ended: to us it lives as long as it answers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from headrace.actors.errors import ActorLost

if TYPE_CHECKING:
    from headrace.actors.engine_group.host import EngineHost
    from headrace.actors.runtime.runtime import RayRuntime
    from headrace.policies.processes.server_process import ServerProcess

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
