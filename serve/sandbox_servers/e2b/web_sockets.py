"""Relay of WebSocket messages between a client and a server inside a sandbox.

Invariants:
- Messages, pings and close codes are passed on as they are; the subprotocol is the one that the server inside chooses.
- A message larger than `_MAX_MESSAGE_BYTES` ends the connection: it would be held in memory.
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

Socket = aiohttp.ClientWebSocketResponse | web.WebSocketResponse

_MAX_MESSAGE_BYTES: Final = 32 << 20
_HANDSHAKE: Final = "sec-websocket-"


async def relay_web_socket(
    request: web.Request, session: aiohttp.ClientSession, url: URL, headers: CIMultiDict[str]
) -> web.StreamResponse:
    """Answer a WebSocket request by relaying messages between its client and `url`. Raises aiohttp.ClientError before
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
            group.create_task(_pump(inside, outside))
            group.create_task(_pump(outside, inside))
    return outside


async def _pump(source: Socket, target: Socket) -> None:
    """Relay messages until either side closes; the close code is passed on."""
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
