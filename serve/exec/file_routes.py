"""Routes for files of one sandbox.

Invariants:
- An upload above `SPOOL_BYTES` is stored in a temporary file of this host, not in memory, and is written to the sandbox
  once it is complete.
- A path is only text here; the provider resolves it inside the sandbox.
- This server opens no connections; the provider allows only the prefix, and the client checks it again. The port in the
  sandbox closes with the WebSocket.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from headrace.sandboxes.base import HostPort
from headrace.sandboxes.errors import SandboxError, SandboxFileError
from headrace.sandboxes.remote.error_documents import to_document
from headrace.sandboxes.remote.file_bundle import SPOOL_BYTES, checked_path, unpack_files
from headrace.sandboxes.remote.tunnel import MAX_MESSAGE_BYTES, Tunnel
from headrace.serve.exec.bodies import MAX_BODY_BYTES, read_bytes, whole_number

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from headrace.sandboxes.base import Sandbox
    from headrace.serve.exec.registry import LeasedSandbox

    Work = Callable[[web.Request, LeasedSandbox, Sandbox], Coroutine[Any, Any, Any]]
    Wrap = Callable[[Work], Callable[[web.Request], Awaitable[web.StreamResponse]]]

MAX_UPLOAD_BYTES: Final = 8 << 30
MAX_READ_BYTES: Final = 256 << 20


class FileRoutes:
    """Handlers of the routes for files."""

    def routes(self, on: Wrap) -> list[web.RouteDef]:
        return [
            web.post("/v1/sandboxes/{id}/read", on(self._read)),
            web.put("/v1/sandboxes/{id}/file", on(self._write)),
            web.put("/v1/sandboxes/{id}/files", on(self._write_many)),
        ]

    async def _read(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> bytes:
        most = whole_number(request, "max_bytes", MAX_READ_BYTES)
        return await sandbox.read(_path(request), user=_user(request), max_bytes=most)

    async def _write(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        size = request.content_length
        if size is not None and size <= SPOOL_BYTES:
            data = await read_bytes(request, SPOOL_BYTES)
            await sandbox.write(_path(request), data, user=_user(request))
            return {}
        with tempfile.NamedTemporaryFile(prefix="headrace-upload-") as file:
            taken = 0
            async for chunk in request.content.iter_chunked(1 << 18):
                taken += len(chunk)
                if taken > MAX_UPLOAD_BYTES:
                    raise SandboxFileError(f"the file is larger than {MAX_UPLOAD_BYTES} bytes")
                await asyncio.to_thread(file.write, chunk)
            await asyncio.to_thread(file.flush)
            await sandbox.write(_path(request), Path(file.name), user=_user(request))
        return {}

    async def _write_many(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        files = unpack_files(await read_bytes(request, MAX_BODY_BYTES))
        await sandbox.write_many(files, user=_user(request))
        return {}


def _path(request: web.Request) -> str:
    return checked_path(request.query.get("path", ""))


def _user(request: web.Request) -> str:
    return request.query.get("user", "root")


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
