"""Admission at the gateway, as a push and the engine group close and open it.

Invariant: a gateway that is gone, hangs or does not come up is told nothing, and holds up nobody.
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
"""A gateway that is silent for so long must not be taken for a failing engine: below every deadline of a push."""


class GatewayGate:
    """The gateway as the engine group knows it; a `Gate` of a push. One that is gone admits nothing, so there is
    nothing to close."""

    def __init__(self, gateway: GatewayActor, registry: EngineRegistry) -> None:
        self._gateway = gateway
        self._registry = registry

    async def close(self, engine_id: EngineId, lease_s: float) -> None:
        await tell_gateway(self._gateway.close_gate(engine_id, lease_s))

    async def open(self, engine_id: EngineId, *, cache_namespace: str | None) -> Sequence[RequestId]:
        """The gateway itself repeats the aborts. The registry must know, for the next table says so again."""
        self._registry.opened(engine_id, cache_namespace)
        await tell_gateway(self._gateway.open_gate(engine_id, cache_namespace))
        return ()

    async def route(self, table: RoutingTable) -> None:
        """A gateway that is restarting hears it again from the supervision."""
        await tell_gateway(self._gateway.set_engines(table))

    async def stats(self) -> GatewayStats | None:
        """None when it does not answer."""
        try:
            async with asyncio.timeout(GATEWAY_TIMEOUT_S):
                return await self._gateway.stats()
        except (ActorLost, TimeoutError):
            return None


async def tell_gateway(call: Awaitable[object]) -> None:
    """Await a call of the gateway; one that is gone, hangs or does not come up is told nothing."""
    try:
        async with asyncio.timeout(GATEWAY_TIMEOUT_S):
            await call
    except (ActorLost, TimeoutError):
        pass
    except Exception:
        logger.exception("the gateway could not be told")
