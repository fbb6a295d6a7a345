"""Relay of HTTP requests and WebSocket connections to another server: from sandboxes to services of the host, from
clients to ports of sandboxes, and from the front of a gateway to its processes.

Invariants:
- Bodies are streamed in both directions, as they are compressed; at most one chunk is buffered. A slow reader slows the
  writer.
- When a client disconnects, its request is ended. If the server breaks off, so does the answer, without an end that
  would make it look complete.
- Messages, pings and close codes of a WebSocket are passed on as they are; the subprotocol is the one that the server
  chooses. A message larger than `_MAX_MESSAGE_BYTES` ends the connection: it would be held in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

_CHUNK_BYTES: Final = 1 << 16
_NOT_FORWARDED: Final = frozenset(
    (
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "expect"),
    )
)
"""Headers about a single connection (RFC 9110, 7.6.1), Host, which names the service, and Expect, which our server has
answered."""
_NOT_ADDED: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
"""Headers that aiohttp would add to a request that lacks them."""
_HANDSHAKE: Final = "sec-websocket-"
_MAX_MESSAGE_BYTES: Final = 32 << 20

_Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


def relay_session(connector: aiohttp.BaseConnector, *, connect_s: float | None = None) -> aiohttp.ClientSession:
    """Return a session that keeps no cookies and has no time limits but that for connecting."""
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_s),
        # Decompressed bodies would contradict their headers and could be huge.
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


def forwarded(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that are not about a single connection."""
    named = {name.strip().lower() for name in headers.get("Connection", "").split(",")}
    return CIMultiDict(pair for pair in headers.items() if pair[0].lower() not in _NOT_FORWARDED | named)


async def ask(
    request: web.BaseRequest, session: aiohttp.ClientSession, url: URL, headers: Mapping[str, str]
) -> aiohttp.ClientResponse:
    """Return the head of the answer to a request that is passed on with its body. Raises aiohttp.ClientError."""
    return await session.request(
        request.method,
        url,
        headers=headers,
        data=request.content.iter_chunked(_CHUNK_BYTES) if request.body_exists else None,
        allow_redirects=False,
        skip_auto_headers=_NOT_ADDED,
    )


async def stream_back(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Answer a request with what a server answers, piece by piece."""
    async with answer:
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


async def forward_web_socket(
    request: web.Request, session: aiohttp.ClientSession, url: URL, headers: CIMultiDict[str]
) -> web.StreamResponse:
    """Answer a WebSocket request by passing on messages between its client and `url`. Raises aiohttp.ClientError before
    the handshake is complete."""
    for name in [name for name in headers if name.lower().startswith(_HANDSHAKE)]:
        headers.popall(name, None)
    offered = [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",") if name.strip()]
    try:
        inside = await session.ws_connect(
            url, protocols=offered, headers=headers, autoping=False, autoclose=False, max_msg_size=_MAX_MESSAGE_BYTES
        )
    except aiohttp.WSServerHandshakeError as error:
        return web.Response(status=error.status if error.status >= 400 else 502, text=error.message)
    async with inside:
        chosen = (inside.protocol,) if inside.protocol else ()
        outside = web.WebSocketResponse(
            protocols=chosen, autoping=False, autoclose=False, max_msg_size=_MAX_MESSAGE_BYTES
        )
        await outside.prepare(request)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pass_messages(inside, outside))
            group.create_task(_pass_messages(outside, inside))
    return outside


async def _pass_messages(source: _Socket, target: _Socket) -> None:
    """Pass messages on until either side closes; the close code is passed on."""
    while True:
        message = await source.receive()
        try:
            match message.type:
                case aiohttp.WSMsgType.TEXT:
                    await target.send_str(message.data)
                case aiohttp.WSMsgType.BINARY:
                    await target.send_bytes(message.data)
                case aiohttp.WSMsgType.PING:
                    await target.ping(message.data)
                case aiohttp.WSMsgType.PONG:
                    await target.pong(message.data)
                case aiohttp.WSMsgType.CLOSE:
                    code = message.data or aiohttp.WSCloseCode.OK
                    await target.close(code=code, message=(message.extra or "").encode())
                    await source.close(code=code)
                    return
                case aiohttp.WSMsgType.CLOSING:
                    # The other direction closes this side.
                    return
                case _:
                    await target.close(code=aiohttp.WSCloseCode.GOING_AWAY)
                    return
        except ConnectionError:
            await source.close(code=aiohttp.WSCloseCode.GOING_AWAY)
            return
