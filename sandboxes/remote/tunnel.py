"""Connections from a sandbox to a service on another host, each over a WebSocket of its own, for `expose`.

The client opens a WebSocket with the port, on which the server names each connection that the sandbox makes; the client
opens a second WebSocket with that name. There, a binary message is data, and a text message is the end of one
direction. Invariants:
- The end of one direction leaves the other open; an error ends both. The end of the first WebSocket ends all
  connections.
- A slow reader slows only its own connection, by the TCP connection of its WebSocket.
"""

from __future__ import annotations

import asyncio
from typing import Final, TypeAlias

import aiohttp
from aiohttp import WSMsgType, web

MAX_CONNECTIONS: Final = 64
"""Open connections of one exposed port."""
_PIECE_BYTES: Final = 1 << 15
MAX_MESSAGE_BYTES: Final = 1 << 17

WebSocket: TypeAlias = aiohttp.ClientWebSocketResponse | web.WebSocketResponse


async def carry(socket: WebSocket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on between a WebSocket and a connection until both directions have ended, and close the connection.
    If one of the two breaks, both end."""

    async def outward() -> None:
        while data := await reader.read(_PIECE_BYTES):
            await socket.send_bytes(data)
        await socket.send_str("")

    async def inward() -> None:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                writer.write_eof()
                return
            if message.type is not WSMsgType.BINARY:
                break
            writer.write(message.data)
            await writer.drain()
        raise ConnectionError("the other side is gone")

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(outward())
            group.create_task(inward())
        writer.close()
    except* (OSError, RuntimeError):
        # A closed WebSocket or writer raises errors of these kinds.
        pass
    finally:
        if not writer.is_closing():
            writer.transport.abort()
