"""Routes for files of one sandbox.

Invariants:
- An upload above `SPOOL_BYTES` is stored in a temporary file of this host, not in memory, and is written to the sandbox
  once it is complete.
- A path is only text here; the provider resolves it inside the sandbox.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aiohttp import web

from headrace.sandboxes.errors import SandboxFileError
from headrace.sandboxes.remote.file_bundle import SPOOL_BYTES, checked_path, unpack_files
from headrace.serve.exec.bodies import MAX_BODY_BYTES, read_bytes, whole_number

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from headrace.sandboxes.base import Sandbox
    from headrace.serve.exec.store import LeasedSandbox

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
