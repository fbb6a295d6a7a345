"""The gateway actor: `headrace.serve.gateway.gateway.Gateway` on a port that stays the same over restarts.

Invariants:
- Address and admin token are in a file of the run directory that only its owner can read; a restarted gateway takes
  them from there, so that base URLs stay true.
- The port is none that the kernel gives to outgoing connections: else one of them could hold it when the gateway comes
  back, even a client that called the dead port and was connected with itself.
"""

from __future__ import annotations

import errno
import logging
import random
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import orjson

from headrace.actors.runtime.resources import ResourceOwner
from headrace.buffer.primitives.durable_files import write_private
from headrace.serve.gateway.garbage_collection import portioned_collections
from headrace.serve.gateway.gateway import Gateway, GatewayStats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headrace.actors.record.actor_telemetry import ActorTelemetry
    from headrace.policies.engine import EngineId
    from headrace.serve.gateway.config import GatewayConfig
    from headrace.serve.gateway.routing import RoutingTable


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayAddress:
    """Where the workers find the gateway's admin routes."""

    url: str
    admin_token: str = field(repr=False)


class GatewayActor(ResourceOwner):
    """Starts the gateway when entered; the same address after a restart."""

    def __init__(self, config: GatewayConfig, *, address_file: Path, observing: ActorTelemetry) -> None:
        super().__init__()
        self._config = config
        self._address_file = address_file
        self._observing = observing

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self._observing.spans("gateway"))
        known = read_address(self._address_file)
        token = known.admin_token if known else secrets.token_urlsafe(32)
        self._gateway = Gateway(self._config, token)
        url = await self._gateway.start(port=urlsplit(known.url).port or 0) if known else await self._start_first()
        self._stack.push_async_callback(self._gateway.stop)
        await self._stack.enter_async_context(portioned_collections())
        self._address = GatewayAddress(url=url, admin_token=token)
        write_private(self._address_file, orjson.dumps(asdict(self._address)))
        return self

    async def _start_first(self) -> str:
        for port in stable_ports():
            try:
                return await self._gateway.start(port=port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
        # A kernel whose range is all ports leaves no better choice.
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


def stable_ports() -> Iterator[int]:
    """Ports from 10,000 outside the kernel's range for outgoing connections, in random order."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    outside = [*range(10_000, first), *range(last + 1, 1 << 16)]
    yield from random.sample(outside, len(outside))


def read_address(path: Path) -> GatewayAddress | None:
    """The address a gateway of this run had, None before the first start. A file without a readable address is written
    anew by the next start; sessions of the old address end then."""
    if not path.exists():
        return None
    try:
        return GatewayAddress(**orjson.loads(path.read_bytes()))
    except (TypeError, ValueError) as error:
        logger.warning("%s holds no address (%s): the gateway takes a new one", path, error)
        return None
