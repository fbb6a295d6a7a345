"""The gateway actor, which runs `serve.gateway.gateway.Gateway` on a port that survives restarts.

Invariants:
- The address and the admin token are in a private file in the run directory; a restarted gateway reuses them, so that
  base URLs stay valid.
- The port is outside the kernel's range for outgoing connections. Otherwise an outgoing connection could occupy the
  port while the gateway restarts; it could even be a client of the dead gateway that the kernel gave this port and so
  connected to itself.
"""

from __future__ import annotations

import errno
import logging
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import orjson

from headrace.actors.record.files.actor_telemetry import ActorTelemetry
from headrace.buffer.primitives.durable_files import write_private
from headrace.buffer.primitives.exit_stack import ResourceOwner
from headrace.policies.engine import EngineId
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway, GatewayStats
from headrace.serve.gateway.http.placement import stable_ports
from headrace.serve.gateway.http.routing import RoutingTable
from headrace.serve.gateway.http.standalone import portioned_collections

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAddress:
    """URL and token of the admin routes, for workers."""

    url: str
    admin_token: str = field(repr=False)


class GatewayActor(ResourceOwner):
    """Actor that runs the gateway, and keeps its address after a restart."""

    def __init__(self, config: GatewayConfig, *, address_file: Path, observing: ActorTelemetry) -> None:
        super().__init__()
        self._config = config
        self._address_file = address_file
        self._observing = observing

    async def __aenter__(self) -> Self:
        tracing = self._stack.enter_context(self._observing.spans("gateway"))
        known = read_address(self._address_file)
        token = known.admin_token if known else secrets.token_urlsafe(32)
        self._gateway = Gateway(self._config, token, intake=tracing.intake())
        if known is not None:
            url = await self._gateway.start(port=urlsplit(known.url).port or 0)
        else:
            url = await self._start_on_stable_port()
        self._stack.push_async_callback(self._gateway.stop)
        await self._stack.enter_async_context(portioned_collections())
        self._address = GatewayAddress(url=url, admin_token=token)
        write_private(self._address_file, orjson.dumps(asdict(self._address)))
        return self

    async def _start_on_stable_port(self) -> str:
        for port in stable_ports():
            try:
                return await self._gateway.start(port=port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        # All ports are taken, or in the range for outgoing connections.
        return await self._gateway.start()

    async def address(self) -> GatewayAddress:
        return self._address

    async def set_engines(self, table: RoutingTable) -> bool:
        return await self._gateway.set_engines(table)

    async def close_gate(self, engine_id: EngineId, lease_s: float) -> None:
        await self._gateway.close_gate(engine_id, lease_s)

    async def open_gate(self, engine_id: EngineId, cache_namespace: str | None) -> None:
        await self._gateway.open_gate(engine_id, cache_namespace)

    async def stats(self) -> GatewayStats:
        return await self._gateway.in_flight()


def read_address(path: Path) -> GatewayAddress | None:
    """Read the address of this run's gateway. Returns None before the first start. An unreadable file is replaced on
    the next start, which ends the sessions at the old address."""
    if not path.exists():
        return None
    try:
        return GatewayAddress(**orjson.loads(path.read_bytes()))
    except (TypeError, ValueError) as error:
        logger.warning("%s does not contain a valid address (%s): the gateway gets a new one", path, error)
        return None
