"""Gateway client of the engine group: gates of engines, and routing tables.

Invariant: a gateway that is dead, hung or not starting causes neither delays nor errors.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from headrace.actors.errors import ActorLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from headrace.actors.engine_group.registry import EngineRegistry
    from headrace.actors.places.gateway import GatewayActor
    from headrace.policies.engine import EngineId, RequestId
    from headrace.serve.gateway.gateway import GatewayStats
    from headrace.serve.gateway.routing import RoutingTable

logger = logging.getLogger(__name__)

GATEWAY_TIMEOUT_S = 5.0
"""Time limit of a gateway call, below every deadline of a push, so that a silent gateway is not mistaken for a failing
engine."""


class GatewayGate:
    """Gateway of the engine group; a `Gate` of a push. A dead gateway admits nothing, so no gate needs closing."""

    def __init__(self, gateway: GatewayActor, registry: EngineRegistry) -> None:
        self._gateway = gateway
        self._registry = registry

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        await call_gateway(self._gateway.close_gate(engine_id, lease_s))

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> Sequence[RequestId]:
        """Open the engine's gate. Returns no aborts to repeat: the gateway repeats them itself."""
        # The next routing table carries the namespace again, from the registry.
        self._registry.opened(engine_id, cache_namespace)
        await call_gateway(self._gateway.open_gate(engine_id, cache_namespace))
        return ()

    async def route(self, table: RoutingTable) -> None:
        """Send a routing table; a restarting gateway gets the next one."""
        await call_gateway(self._gateway.set_engines(table))

    async def stats(self) -> GatewayStats | None:
        """Return the gateway's counts, or None if it does not answer."""
        try:
            async with asyncio.timeout(GATEWAY_TIMEOUT_S):
                return await self._gateway.stats()
        except (ActorLost, TimeoutError):
            return None


async def call_gateway(call: Awaitable[object]) -> None:
    """Await a call to the gateway, and ignore a gateway that is dead, hung or not starting."""
    try:
        async with asyncio.timeout(GATEWAY_TIMEOUT_S):
            await call
    except (ActorLost, TimeoutError):
        pass
    except Exception:
        logger.exception("the call to the gateway failed")
