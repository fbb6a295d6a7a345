"""A service of the host inside a sandbox: an HTTP relay from a listener in there to one URL prefix of the service.

Invariants:
- Only requests whose path is literally the prefix, or below it without dot segments and encoded slashes, pass; all
  others get 403. The sandbox has no other way out.
- Bodies travel in both directions as they come; nothing is held beyond one piece. A client that goes away ends its
  request to the service.
- A hostile client can hold at most `MAX_CONNECTIONS` connections of this process, delays the end of the context by a
  moment at most, and writes nothing to this process's log.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from multidict import CIMultiDictProxy

    from headrace.sandboxes.base import HostPort

MAX_CONNECTIONS: Final = 64
_SHUTDOWN_S: Final = 0.1
"""For each of two steps; aiohttp takes 0 for no limit at all."""
_ACCEPT_AGAIN_S: Final = 0.1
_PIECE_BYTES: Final = 1 << 16
# RFC 9110, 7.6.1: they speak of one connection; and Host, which names the service.
_NOT_PASSED: Final = frozenset(
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
    """Whether a request target as it stands on the wire leads to `prefix` or below it, however a server reads it."""
    path = raw_path.partition("?")[0]
    if path != prefix and not path.startswith(prefix.rstrip("/") + "/"):
        return False
    # Some servers take what follows a semicolon for parameters, before they resolve dots.
    segments = [unquote(segment).partition(";")[0] for segment in path.split("/")]
    return not any(segment in (".", "..") or {"/", "\\", "\0"} & set(segment) for segment in segments)


@asynccontextmanager
async def relay(listener: socket.socket, target: HostPort, prefix: str) -> AsyncIterator[None]:
    """Serve `listener`, which is closed at the end, while the context lasts."""
    listener.setblocking(False)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as session:
        # Compressed bodies stay so: unpacked ones would contradict their headers, and may be huge.
        server = web.Server(
            _Relay(session, target, prefix).handle,
            handler_cancellation=True,
            auto_decompress=False,
            logger=_clients_log,
        )
        accepting = asyncio.create_task(_accept(listener, server))
        # No task group: it would wrap what the caller raises.
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.wait((accepting,))
            listener.close()
            await server.shutdown(_SHUTDOWN_S)


async def _accept(listener: socket.socket, server: web.Server) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError:
            # No descriptor is free: the next may be.
            await asyncio.sleep(_ACCEPT_AGAIN_S)
            continue
        if len(server.connections) >= MAX_CONNECTIONS:
            connection.close()
        else:
            with suppress(OSError):
                await loop.connect_accepted_socket(server, connection)


class _Relay:
    """Handles the requests of one listener."""

    def __init__(self, session: aiohttp.ClientSession, target: HostPort, prefix: str) -> None:
        self._session = session
        self._base = f"http://{target.host}:{target.port}"
        self._prefix = prefix

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if not is_below(request.raw_path, self._prefix):
            return web.Response(status=403, text="this path is not open to the sandbox\n")
        try:
            async with self._session.request(
                request.method,
                URL(self._base + request.raw_path, encoded=True),
                headers=_passed(request.headers),
                data=request.content.iter_chunked(_PIECE_BYTES) if request.body_exists else None,
                allow_redirects=False,
            ) as answer:
                return await _pass_on(request, answer)
        except aiohttp.ClientConnectionError as error:
            return web.Response(status=502, text=f"the service does not answer: {type(error).__name__}\n")


async def _pass_on(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_passed(answer.headers))
    await response.prepare(request)
    try:
        async for piece in answer.content.iter_chunked(_PIECE_BYTES):
            await response.write(piece)
    except aiohttp.ClientError:
        # The service broke off in the middle: so does this answer, without the end that would make it look complete.
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def _passed(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(pair for pair in headers.items() if pair[0].lower() not in _NOT_PASSED | named)
