"""Client side of `expose` for a sandbox on another host: a tunnel from the sandbox to a service on this host.

Invariants:
- Only this process connects to the service, and only for requests below the prefix, so the other host has no more
  access than the sandbox.
- A broken tunnel is reopened while the context is open; requests that were in progress are lost.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from aiohttp import WSMsgType

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.base import HostPort
from headrace.sandboxes.errors import ProviderUnreachable, SandboxError, SpecRefused
from headrace.sandboxes.local.exposed import relay
from headrace.sandboxes.remote.http import RemoteHttp
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.sandboxes.remote.tunnel import WebSocket, carry
from headrace.sandboxes.retry import RetryConfig, full_jitter_s

_BACKLOG: Final = 64

logger = logging.getLogger(__name__)


@asynccontextmanager
async def expose(
    http: RemoteHttp, url: str, secret: str, *, port: int, target: HostPort, prefix: str
) -> AsyncIterator[None]:
    """See `Sandbox.expose`. Raises the server's typed error, ProviderUnreachable."""
    with tempfile.TemporaryDirectory(prefix="headrace-expose-") as folder:
        path = str(Path(folder) / "s")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(path)
        listener.listen(_BACKLOG)
        tunnel = _ReopeningTunnel(http, url, secret, {"port": str(port), "prefix": prefix}, path)
        async with AsyncExitStack() as stack:
            stack.callback(listener.close)
            tasks = await stack.enter_async_context(ServerTasks())
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            tasks.start(tunnel.run(opened))
            await opened
            await stack.enter_async_context(relay(listener, target, prefix))
            yield


class _ReopeningTunnel:
    """A tunnel that is reopened when it breaks."""

    def __init__(self, http: RemoteHttp, url: str, secret: str, query: dict[str, str], path: str) -> None:
        self._http = http
        self._url = url
        self._secret = secret
        self._query = query
        self._path = path

    async def run(self, opened: asyncio.Future[None]) -> None:
        """Run the tunnel. Resolves `opened` once the tunnel is first open, or with the error if opening fails."""
        try:
            await self._once(opened)
        except SandboxError as error:
            if not opened.done():
                opened.set_exception(error)
                return
        config, attempt = RetryConfig(), 0
        while True:
            logger.warning("the tunnel to %s broke and is being reopened", self._url)
            await asyncio.sleep(full_jitter_s(config, attempt))
            attempt += 1
            try:
                await self._once(opened)
                attempt = 0
            except (ProviderUnreachable, SpecRefused):
                # Still unreachable, or the old tunnel holds the port because the server has not noticed its end yet.
                continue
            except SandboxError as error:
                logger.warning("the tunnel to %s could not be reopened: %s", self._url, error)
                return

    async def _once(self, opened: asyncio.Future[None]) -> None:
        async with self._http.socket(self._url, self._secret, self._query) as socket, ServerTasks() as connections:
            if not opened.done():
                opened.set_result(None)
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    return
                connections.start(self._connect(socket, message.json()["connection"]))

    async def _connect(self, tunnel: WebSocket, name: str) -> None:
        """Carry one connection of the sandbox. If it cannot be reached, the tunnel is reopened: the connection would
        wait for ever."""
        try:
            async with self._http.socket(self._url, self._secret, {"connection": name}, heartbeat=False) as socket:
                await carry(socket, *await asyncio.open_unix_connection(self._path))
        except SandboxError as error:
            logger.warning("a connection through the tunnel to %s is lost: %s", self._url, error)
            await tunnel.close()
