"""Client of the run's gateways: gates of engines, and routing tables.

Invariant: a gateway that is dead, hung or not starting causes no errors, and no delay above `GATEWAY_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from headrace.actors.engines.registry import EngineRegistry
from headrace.actors.errors import ActorLost
from headrace.actors.runtime.pools.gateway import GatewayActor
from headrace.policies.engine import EngineId, RequestId
from headrace.serve.gateway.http.gateway import GatewayStats
from headrace.serve.gateway.http.routing import RoutingTable

logger = logging.getLogger(__name__)

GATEWAY_TIMEOUT_S = 5.0
"""Time limit of a gateway call, below every deadline of a push, so that a silent gateway is not mistaken for a failing
engine."""


class GatewayGate:
    """All gateways of a run; a `Gate` of a push. A dead gateway admits nothing, so no gate needs closing there."""

    def __init__(self, gateways: Sequence[GatewayActor], registry: EngineRegistry) -> None:
        self._gateways = gateways
        self._registry = registry

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        await self._call_all(lambda gateway: gateway.close_gate(engine_id, lease_s))

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> Sequence[RequestId]:
        """Open the engine's gate. Returns no aborts to repeat: the gateways repeat them themselves."""
        # The next routing table carries the namespace again, from the registry.
        self._registry.opened(engine_id, cache_namespace)
        await self._call_all(lambda gateway: gateway.open_gate(engine_id, cache_namespace))
        return ()

    async def route(self, table: RoutingTable) -> None:
        """Send a routing table; a restarting gateway gets the next one."""
        await self._call_all(lambda gateway: gateway.set_engines(table))

    async def stats(self) -> GatewayStats | None:
        """Return the counts of the gateways that answer, together, or None if none does."""
        return await stats_of(self._gateways)

    async def _call_all(self, call: Callable[[GatewayActor], Awaitable[object]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for gateway in self._gateways:
                tasks.create_task(call_gateway(call(gateway)))


async def stats_of(gateways: Sequence[GatewayActor]) -> GatewayStats | None:
    """Return the counts of the gateways that answer in time, together, or None if none does."""
    answers = await asyncio.gather(*(_stats_of_one(gateway) for gateway in gateways))
    answered = [stats for stats in answers if stats is not None]
    return GatewayStats.together(answered) if answered else None


async def _stats_of_one(gateway: GatewayActor) -> GatewayStats | None:
    try:
        async with asyncio.timeout(GATEWAY_TIMEOUT_S):
            return await gateway.stats()
    except (ActorLost, TimeoutError):
        return None


async def call_gateway(call: Awaitable[object]) -> None:
    """Await a call to a gateway, and ignore a gateway that is dead, hung or not starting."""
    try:
        async with asyncio.timeout(GATEWAY_TIMEOUT_S):
            await call
    except (ActorLost, TimeoutError):
        pass
    except Exception:
        logger.exception("the call to the gateway failed")
