"""Routes for a sandbox's commands (exec, and spawned processes by their spawn_id), files and tunnels.

Invariants:
- An upload larger than `SPOOL_BYTES` is stored in a temporary file on this host, not in memory, and is written to the
  sandbox once it is complete.
- A path is treated as a string here; the provider resolves it inside the sandbox.
- This server opens no connections for a tunnel; the provider passes only requests below the tunnel's prefix, and the
  client checks them again. The port in the sandbox closes with the WebSocket.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.base import ExecResult, Feature, HostPort, Process, Sandbox, TerminalSize
from headrace.sandboxes.errors import SandboxError, SandboxFileError, SandboxGone, Unsupported
from headrace.sandboxes.remote.error_documents import to_document
from headrace.sandboxes.remote.file_bundle import SPOOL_BYTES, checked_path, unpack_files
from headrace.sandboxes.remote.tunnel import MAX_CONNECTIONS, MAX_MESSAGE_BYTES, carry
from headrace.serve.sandbox_servers.exec.bodies import (
    MAX_BODY_BYTES,
    Exec,
    Signal,
    Size,
    Spawn,
    Stdin,
    read_body,
    read_bytes,
    whole_number,
)
from headrace.serve.sandbox_servers.exec.processes import LONGEST_POLL_S, BufferedProcess, SpawnTable
from headrace.serve.sandbox_servers.exec.registry import LeasedSandbox, SandboxRegistry

Work = Callable[[web.Request, LeasedSandbox, Sandbox], Coroutine[Any, Any, Any]]
Wrap = Callable[[Work], Callable[[web.Request], Awaitable[web.StreamResponse]]]

_EXEC: Final = "/v1/sandboxes/{id}/exec"
_PROCESSES: Final = "/v1/sandboxes/{id}/processes"
_PROCESS: Final = _PROCESSES + "/{spawn_id}"


class CommandRoutes:
    """Handlers of the routes for commands."""

    def __init__(self, registry: SandboxRegistry, processes: SpawnTable) -> None:
        self._registry = registry
        self._processes = processes

    def routes(self, on: Wrap) -> list[web.RouteDef]:
        return [
            web.post(_EXEC, on(self._exec)),
            web.post(_PROCESSES, on(self._spawn)),
            web.get(f"{_PROCESS}/output", on(self._output)),
            web.get(f"{_PROCESS}/end", on(self._end)),
            web.post(f"{_PROCESS}/stdin", on(self._stdin)),
            web.delete(f"{_PROCESS}/stdin", on(self._close_stdin)),
            web.post(f"{_PROCESS}/signal", on(self._signal)),
            web.post(f"{_PROCESS}/size", on(self._resize)),
        ]

    async def _exec(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Exec)
        if body.exec_id is None:
            return _result(await sandbox.exec(**body.model_dump()))
        if Feature.EXEC_ID not in self._registry.provider.features:
            raise Unsupported("the server's provider does not support exec_id: omit it, and do not repeat the request")
        # A repeated request waits for the first run, which continues without its client.
        return _result(await asyncio.shield(self._registry.tasks.share(sandbox.exec(**body.model_dump()))))

    async def _spawn(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Spawn)

        async def start() -> Process:
            size = body.terminal
            terminal = None if size is None else TerminalSize(rows=size.rows, columns=size.columns)
            return await sandbox.spawn(
                body.command,
                user=body.user,
                env=body.env,
                cwd=body.cwd,
                stdin=body.stdin,
                terminal=terminal,
                timeout_s=body.timeout_s,
            )

        kept = await self._processes.spawn(row.id, body.spawn_id, start)
        return {"pid": kept.process.pid}

    async def _find(self, request: web.Request, row: LeasedSandbox) -> BufferedProcess:
        return await self._processes.find(row.id, request.match_info["spawn_id"])

    async def _output(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        after = whole_number(request, "after", 1 << 60)
        pieces, ended = await (await self._find(request, row)).window.after(after, LONGEST_POLL_S)
        encoded = [[piece.stream.value, base64.b64encode(piece.data).decode()] for piece in pieces]
        return {"pieces": encoded, "ended": ended}

    async def _end(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        return {"exit_code": await (await self._find(request, row)).wait(LONGEST_POLL_S)}

    async def _stdin(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Stdin)
        kept = await self._find(request, row)
        # A cancelled write could not be continued, because the number of written bytes would be unknown.
        return {"taken": await asyncio.shield(self._registry.tasks.share(kept.write_stdin(body.offset, body.data)))}

    async def _close_stdin(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        await (await self._find(request, row)).process.close_stdin()
        return {}

    async def _signal(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Signal)
        await (await self._find(request, row)).process.signal(body.number)
        return {}

    async def _resize(self, request: web.Request, row: LeasedSandbox, sandbox: Sandbox) -> Any:
        body = await read_body(request, Size)
        await (await self._find(request, row)).process.resize(TerminalSize(rows=body.rows, columns=body.columns))
        return {}


def _result(result: ExecResult) -> dict[str, Any]:
    return {
        "exit_code": result.exit_code,
        "stdout": base64.b64encode(result.stdout).decode(),
        "stderr": base64.b64encode(result.stderr).decode(),
        "truncated": result.truncated,
        "duration_s": result.duration_s,
    }


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


class Tunnels:
    """Exposed ports, and the connections that sandboxes have made to them."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        """Connections whose WebSocket has not been opened yet, by name."""

    async def serve(self, request: web.Request, find: Callable[[], Awaitable[Sandbox]]) -> web.StreamResponse:
        """Serve a tunnel, or one of its connections. The first message is `{}` once it is open, or an error
        document."""
        name = request.query.get("connection")
        # A connection is not read while its reader is slow; it ends with its tunnel.
        heartbeat_s = HEARTBEAT_S if name is None else None
        socket = web.WebSocketResponse(heartbeat=heartbeat_s, max_msg_size=MAX_MESSAGE_BYTES, compress=False)
        await socket.prepare(request)
        try:
            sandbox = await find()
            if name is None:
                await self._listen(socket, sandbox, whole_number(request, "port", _MAX_PORT), request)
            elif (waiting := self._waiting.pop(name, None)) is None:
                raise SandboxGone("this connection has ended")
            else:
                await socket.send_json({})
                await carry(socket, *waiting)
        except SandboxError as error:
            await socket.send_json(to_document(error))
        await socket.close()
        return socket

    async def _listen(self, socket: web.WebSocketResponse, sandbox: Sandbox, port: int, request: web.Request) -> None:
        """Name the connections to a port until the WebSocket ends."""
        connected: set[asyncio.StreamWriter] = set()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(connected) >= MAX_CONNECTIONS:
                writer.transport.abort()
                return
            name = secrets.token_hex(16)
            self._waiting[name] = reader, writer
            connected.add(writer)
            with suppress(OSError):
                await socket.send_json({"connection": name})
                await writer.wait_closed()
            connected.remove(writer)
            self._waiting.pop(name, None)

        def abort_all() -> None:
            for writer in connected:
                writer.transport.abort()

        async with AsyncExitStack() as stack:
            server = await asyncio.start_server(accept, "127.0.0.1", 0)
            await stack.enter_async_context(server)
            stack.callback(abort_all)
            inner = HostPort(host="127.0.0.1", port=server.sockets[0].getsockname()[1])
            await stack.enter_async_context(sandbox.expose(port, inner, request.query.get("prefix", "")))
            await socket.send_json({})
            async for _ in socket:
                # The client says nothing.
                pass
