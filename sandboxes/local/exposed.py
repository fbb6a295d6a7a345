"""HTTP relay from a listener inside a sandbox to one URL prefix of a service on the host.

Invariants:
- Only requests whose path is literally the prefix, or is below it without dot segments or encoded slashes, pass; all
  others get 403. The sandbox has no other network access.
- Bodies are streamed in both directions; at most one chunk is buffered. When a client disconnects, its request to the
  service is ended.
- A hostile client can hold at most `MAX_CONNECTIONS` connections to this process, can delay the end of the context only
  by `_SHUTDOWN_S` per step, and cannot write to this process's log.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from headrace.sandboxes.base import HostPort

MAX_CONNECTIONS: Final = 64
_SHUTDOWN_S: Final = 0.1
"""Timeout of each of two shutdown steps; aiohttp interprets 0 as no limit."""
_ACCEPT_AGAIN_S: Final = 0.1
_CHUNK_BYTES: Final = 1 << 16
# Headers about a single connection (RFC 9110, 7.6.1), and Host, which names the service.
_NOT_FORWARDED: Final = frozenset(
    (
        "connection",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)

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
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        # Compressed bodies stay compressed: decompressed ones would contradict their headers and could be huge.
        server = web.Server(
            _Relay(session, target, prefix).handle,
            handler_cancellation=True,
            auto_decompress=False,
            logger=_clients_log,
        )

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


class _Relay:
    """Handler for the requests of one listener."""

    def __init__(self, session: aiohttp.ClientSession, target: HostPort, prefix: str) -> None:
        self._session = session
        self._base = f"http://{target.host}:{target.port}"
        self._prefix = prefix

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if not is_below(request.raw_path, self._prefix):
            return web.Response(status=403, text="this path is not accessible from the sandbox\n")
        try:
            async with self._session.request(
                request.method,
                URL(self._base + request.raw_path, encoded=True),
                headers=_forwarded(request.headers),
                data=request.content.iter_chunked(_CHUNK_BYTES) if request.body_exists else None,
                allow_redirects=False,
            ) as answer:
                headers = _forwarded(answer.headers)
                response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
                await response.prepare(request)
                try:
                    async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                        await response.write(chunk)
                except aiohttp.ClientError:
                    # The service broke off. Abort this response too, without the end that would make it look complete.
                    if request.transport is not None:
                        request.transport.abort()
                    return response
                await response.write_eof()
                return response
        except aiohttp.ClientConnectionError as error:
            return web.Response(status=502, text=f"the service does not answer: {type(error).__name__}\n")


def _forwarded(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(pair for pair in headers.items() if pair[0].lower() not in _NOT_FORWARDED | named)
