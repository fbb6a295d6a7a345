"""Route of `expose`: a WebSocket that carries connections from the sandbox to a service of the client.

Invariants: this server opens no connections; the provider allows only the prefix, and the client checks it again. The
port in the sandbox closes with the WebSocket.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from aiohttp import web

from headrace.sandboxes.base import HostPort
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.remote.error_documents import to_document
from headrace.sandboxes.remote.tunnel import MAX_MESSAGE_BYTES, Tunnel
from headrace.serve.exec.bodies import whole_number

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.sandboxes.base import Sandbox

HEARTBEAT_S: Final = 10.0
_MAX_PORT: Final = 65535


async def expose(request: web.Request, find: Callable[[], Awaitable[Sandbox]]) -> web.StreamResponse:
    """Serve a tunnel. Its first message is `{}` once the port is open, or an error document."""
    socket = web.WebSocketResponse(heartbeat=HEARTBEAT_S, max_msg_size=MAX_MESSAGE_BYTES, compress=False)
    await socket.prepare(request)
    tunnel = Tunnel(socket)
    try:
        async with AsyncExitStack() as stack:
            sandbox = await find()
            port = whole_number(request, "port", _MAX_PORT)
            server = await asyncio.start_server(tunnel.accept, "127.0.0.1", 0)
            await stack.enter_async_context(server)
            inner = HostPort(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
            await stack.enter_async_context(sandbox.expose(port, inner, request.query.get("prefix", "")))
            await socket.send_json({})
            await tunnel.run()
    except SandboxError as error:
        await socket.send_json(to_document(error))
    await socket.close()
    return socket
