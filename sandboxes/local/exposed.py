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
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

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

_NOT_ADDED: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add to a request that lacks them."""

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
            return await forward(
                request, self._session, URL(self._base + request.raw_path, encoded=True), forwarded(request.headers)
            )
        except aiohttp.ClientConnectionError as error:
            return web.Response(status=502, text=f"the service does not answer: {type(error).__name__}\n")


async def forward(
    request: web.BaseRequest, session: aiohttp.ClientSession, url: URL, headers: CIMultiDict[str]
) -> web.StreamResponse:
    """Pass a request on to `url` and stream the answer back. If the service breaks off, so does the answer, without an
    end that would make it look complete. Raises aiohttp.ClientConnectionError before anything has been sent."""
    async with session.request(
        request.method,
        url,
        headers=headers,
        data=request.content.iter_chunked(_CHUNK_BYTES) if request.body_exists else None,
        allow_redirects=False,
        skip_auto_headers=_NOT_ADDED,
    ) as answer:
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=forwarded(answer.headers))
        await response.prepare(request)
        try:
            async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
                await response.write(chunk)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.abort()
            return response
        await response.write_eof()
        return response


def forwarded(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that are not about a single connection."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(pair for pair in headers.items() if pair[0].lower() not in _NOT_FORWARDED | named)
