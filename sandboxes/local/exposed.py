"""HTTP relay from a listener inside a sandbox to one URL prefix of a service on the host.

Invariants:
- Only requests whose path is literally the prefix, or is below it without dot segments or encoded slashes, pass; all
  others get 403. The sandbox has no other network access.
- A hostile client can hold at most `MAX_CONNECTIONS` connections to this process, can delay the end of the context only
  by `_SHUTDOWN_S` per step, and cannot write to this process's log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from headrace.sandboxes.base import HostPort
from headrace.sandboxes.host.http_relay import ask, forwarded, relay_session, stream_back

MAX_CONNECTIONS: Final = 64
_SHUTDOWN_S: Final = 0.1
"""Timeout of each of two shutdown steps; aiohttp interprets 0 as no limit."""
_ACCEPT_AGAIN_S: Final = 0.1

# aiohttp logs a traceback for each malformed request: the sandbox would fill the host's disk with them.
_clients_log = logging.getLogger(f"{__name__}.clients")
_clients_log.setLevel(logging.CRITICAL)


def is_below(raw_path: str, prefix: str) -> bool:
    """Return True if a request target, as sent, leads to `prefix` or below it however a server interprets it."""
    path = raw_path.partition("?")[0]
    if path != prefix and not path.startswith(prefix.rstrip("/") + "/"):
        return False
    # Some servers remove parameters after a semicolon before they resolve dots.
    segments = [unquote(segment).partition(";")[0] for segment in path.split("/")]
    return not any(segment in (".", "..") or {"/", "\\", "\0"} & set(segment) for segment in segments)


@asynccontextmanager
async def relay(listener: socket.socket, target: HostPort, prefix: str) -> AsyncIterator[None]:
    """Serve `listener` while the context is open, and close it at the end."""
    listener.setblocking(False)
    async with relay_session(aiohttp.TCPConnector(limit=0)) as session:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            if not is_below(request.raw_path, prefix):
                return web.Response(status=403, text="this path is not accessible from the sandbox\n")
            url = URL(f"http://{target.host}:{target.port}{request.raw_path}", encoded=True)
            try:
                answer = await ask(request, session, url, forwarded(request.headers))
            except aiohttp.ClientConnectionError as error:
                return web.Response(status=502, text=f"the service does not answer: {type(error).__name__}\n")
            return await stream_back(request, answer)

        server = web.Server(handle, handler_cancellation=True, auto_decompress=False, logger=_clients_log)

        async def accept_connections() -> None:
            loop = asyncio.get_running_loop()
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError:
                    # No descriptor is free now.
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                if len(server.connections) >= MAX_CONNECTIONS:
                    connection.close()
                else:
                    with suppress(OSError):
                        await loop.connect_accepted_socket(server, connection)

        accepting = asyncio.create_task(accept_connections())
        # No task group, because it would wrap the caller's exceptions.
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.wait((accepting,))
            listener.close()
            await server.shutdown(_SHUTDOWN_S)
