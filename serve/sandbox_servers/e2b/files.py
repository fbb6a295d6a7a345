"""envd's routes GET and POST `/files`, which stream contents to and from a process in the sandbox.

Invariants:
- Contents are never stored here: a slow client slows only its own transfer, through the process's pipe.
- The file is opened inside the sandbox by a process run as the user; only regular files are read. Where a request names
  no user and the default user lacks the right, root acts for that user.
- A download has the announced length, or else its connection is cut; an upload is confirmed after its writer has
  succeeded.
- Until it expires, a signature is valid for one path, one operation and one user of the sandbox with whose token it was
  made; it is compared in constant time.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import posixpath
import re
import shlex
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from hmac import compare_digest
from typing import Final

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from headrace.sandboxes.base import Process, Stream
from headrace.sandboxes.errors import SandboxError, SandboxFileError, SandboxGone
from headrace.serve.sandbox_servers.e2b.envd import TOKEN_HEADER, Envd
from headrace.serve.sandbox_servers.e2b.file_metadata import parse_metadata, store_metadata
from headrace.serve.sandbox_servers.e2b.filesystem_service import code_of
from headrace.serve.sandbox_servers.e2b_state.entries import Account
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError, Code, RpcError, rpc_error
from headrace.serve.sandbox_servers.e2b_state.lifecycle import Sandboxes
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import LiveSandbox

_CHUNK_BYTES: Final = 1 << 16
_FILE_NAME: Final = re.compile(r';\s*filename="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_MAX_MESSAGE_BYTES: Final = 4096
_MAX_SIZE_DIGITS: Final = 19
_TRANSFER_TIMEOUT_S: Final = 3600.0
_MISSING, _REFUSED = 41, 40
_SIGKILL: Final = 9
_HEAD: Final = """export LC_ALL=C
fail() { echo "$2" >&2; exit "$1"; }
"""
_READ: Final = f"""{_HEAD}[ -e "$1" ] || fail {_MISSING} "path '$1' does not exist"
[ -d "$1" ] && fail {_REFUSED} "path '$1' is a directory"
[ -f "$1" ] || fail {_REFUSED} "path '$1' is not a regular file"
exec < "$1" || exit 1
size=$(stat -L -c %s /proc/self/fd/0) || exit 1
printf '%s\\0' "$size"
exec head -c "$size"
"""
_WRITE: Final = f"""{_HEAD}[ -d "$1" ] && fail {_REFUSED} "path is a directory: $1"
[ ! -e "$1" ] || [ -f "$1" ] || fail {_REFUSED} "path is not a regular file: $1"
mkdir -p -- "$(dirname -- "$1")" && exec cat > "$1"
"""
_WRITE_FOR: Final = f"""{_HEAD}[ -d "$1" ] && fail {_REFUSED} "path is a directory: $1"
[ ! -e "$1" ] || [ -f "$1" ] || fail {_REFUSED} "path is not a regular file: $1"
path=$1 first=
[ -e "$1" ] || first=$1
while [ "$path" != / ]; do
  [ -L "$path" ] && [ "$(stat -c %u -- "$path")" != 0 ] && fail 1 "the link $path: Permission denied"
  path=$(dirname -- "$path")
  [ -e "$path" ] || first=$path
done
mkdir -p -- "$(dirname -- "$1")" && cat > "$1" || exit 1
[ -z "$first" ] || chown -hR -- "$2:" "$first"
"""
"""As root for a user who may not write there: what is new belongs to the user, and no link of another user's is
followed."""
_MAY_WRITE: Final = """path=$1
[ -e "$path" ] && { [ -w "$path" ]; exit; }
while [ ! -e "$path" ]; do path=$(dirname -- "$path"); done
[ -d "$path" ] && [ -w "$path" ] && [ -x "$path" ]
"""
_MAY_READ: Final = '[ -r "$1" ]'
_CHECK_TIMEOUT_S: Final = 30.0
_ROOT: Final = "root"
_STATUS_OF_CODE: Final = {
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 507,
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.UNAUTHENTICATED: 401,
    Code.UNIMPLEMENTED: 501,
}


def signature(path: str, operation: str, user: str, token: str, expiration: str) -> str:
    """Return the signature for a URL. `operation` is `read` or `write`; `user` and `expiration` are "" if the URL has
    none."""
    parts = [path, operation, user, token] + ([expiration] if expiration else [])
    digest = hashlib.sha256(":".join(parts).encode(errors="surrogatepass")).digest()
    return "v1_" + base64.b64encode(digest).rstrip(b"=").decode("ascii")


def find_signed(running: Iterable[LiveSandbox], query: Mapping[str, str], operation: str) -> LiveSandbox:
    """Find the sandbox with whose token a URL was signed, since the URL does not name the sandbox. Raises ApiError
    401."""
    given, expiration = query.get("signature", ""), query.get("signature_expiration", "")
    if not given:
        raise ApiError(401, "missing signature query parameter")
    path, user = query.get("path", ""), query.get("username", "")
    found = None
    for live in running:
        expected = signature(path, operation, user, live.row.access_token, expiration)
        if compare_digest(expected.encode(), given.encode(errors="surrogatepass")):
            found = live
    if found is None:
        raise ApiError(401, "invalid signature")
    if expiration and not (expiration.isascii() and expiration.isdigit() and int(expiration) >= time.time()):
        raise ApiError(401, "signature is already expired")
    return found


class Files:
    """Handlers for `/files`."""

    def __init__(self, sandboxes: Sandboxes, envd: Envd) -> None:
        self._sandboxes = sandboxes
        self._envd = envd

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/files", self._answer("read", _download)),
            web.post("/files", self._answer("write", _upload)),
            web.options("/files", _preflight),
        ]

    def _answer(
        self, operation: str, transfer: Callable[[web.Request, LiveSandbox], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            try:
                if TOKEN_HEADER in request.headers:
                    live = self._envd.open(request)
                else:
                    live = find_signed(self._sandboxes.reachable(), request.query, operation)
                    await self._sandboxes.wake(live)
                try:
                    return await transfer(request, live)
                except SandboxGone as error:
                    raise self._envd.gone(live) from error
                except SandboxError as error:
                    raise rpc_error(error, live.row.id) from error
            except ApiError as error:
                return error.response()
            except RpcError as error:
                return ApiError(_STATUS_OF_CODE.get(error.code, 500), error.message).response()

        return handler


async def allow_all_origins(request: web.Request, response: web.StreamResponse) -> None:
    """Let web pages of any origin read answers about files (a signal of the application). A page needs a signature or a
    token, and cookies mean nothing here."""
    if request.path == "/files":
        response.headers["Access-Control-Allow-Origin"] = "*"
        response.headers["Access-Control-Expose-Headers"] = "Content-Length, Content-Disposition"


async def _preflight(request: web.Request) -> web.Response:
    asked = request.headers.get("Access-Control-Request-Headers", "*")
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
            "Access-Control-Allow-Headers": asked,
            "Access-Control-Max-Age": "7200",
        },
    )


class _Transfer:
    """A process that reads or writes one file, and its message on standard error."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._message = b""

    async def chunks(self) -> AsyncGenerator[bytes]:
        async for piece in self._process.output():
            if piece.stream is Stream.STDERR:
                self._message = (self._message + piece.data)[:_MAX_MESSAGE_BYTES]
            else:
                yield piece.data

    async def check(self) -> None:
        """Wait for the process to end. Raises ApiError if it failed, SandboxError."""
        code = await self._process.wait()
        if code == 0:
            return
        text = self._message.decode(errors="replace").strip() or f"exit code {code}"
        if code in (_MISSING, _REFUSED):
            raise ApiError(404 if code == _MISSING else 400, text)
        raise ApiError(_STATUS_OF_CODE.get(code_of(text), 500), text)


async def _start(live: LiveSandbox, user: str, script: str, path: str, *more: str, stdin: bool) -> Process:
    return await live.handle.spawn(
        ["/bin/bash", "-c", script, "bash", path, *more],
        user=user,
        cwd="/",
        stdin=stdin,
        timeout_s=_TRANSFER_TIMEOUT_S,
    )


async def _download(request: web.Request, live: LiveSandbox) -> web.StreamResponse:
    account = await live.accounts.find(request.query.get("username", ""))
    path = account.resolve(request.query.get("path", ""))
    user = account.name if await _may(request, live, account, _MAY_READ, path) else _ROOT
    process = await _start(live, user, _READ, path, stdin=False)
    try:
        return await _send(request, process)
    except BaseException:
        await asyncio.shield(process.signal(_SIGKILL))
        raise


async def _send(request: web.Request, process: Process) -> web.StreamResponse:
    transfer = _Transfer(process)
    async with aclosing(transfer.chunks()) as chunks:
        head = b""
        async for chunk in chunks:
            head += chunk
            if b"\0" in head or len(head) > _MAX_SIZE_DIGITS:
                break
        else:
            await transfer.check()
            raise ApiError(500, "the file could not be read")
        # The size that the reader announces, and the first bytes. Programs of the image may print anything.
        digits, nul, first = head.partition(b"\0")
        if not nul or not digits.isdigit() or len(digits) > _MAX_SIZE_DIGITS:
            raise ApiError(500, "the programs of this image do not report the file's size")
        size = int(digits)
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Vary": "Accept-Encoding"})
        response.content_length = size
        await response.prepare(request)
        await response.write(first)
        sent = len(first)
        async for chunk in chunks:
            sent += len(chunk)
            if sent > size:
                break
            await response.write(chunk)
    if sent != size and request.transport is not None:
        # The file shrank meanwhile, or its reader is manipulated: cut the connection, so that the client notices.
        request.transport.abort()
        await process.signal(_SIGKILL)
    await response.write_eof()
    return response


async def _upload(request: web.Request, live: LiveSandbox) -> web.StreamResponse:
    metadata = parse_metadata(request.headers)
    account = await live.accounts.find(request.query.get("username", ""))
    if request.content_type == "application/octet-stream":
        if not request.query.get("path"):
            raise ApiError(400, "path query parameter is required for raw body upload")
        path = account.resolve(request.query["path"])
        await _write(request, live, account, path, request.content.iter_chunked(_CHUNK_BYTES))
        written = [path]
    elif request.content_type.startswith("multipart/"):
        written = await _write_parts(request, live, account)
    else:
        message = f"unsupported content type {request.content_type!r}: multipart/form-data or application/octet-stream"
        raise ApiError(400, message)
    if metadata:
        await store_metadata(live, account.name, written, metadata)
    shown = {"metadata": metadata} if metadata else {}
    return web.json_response(
        [{"name": posixpath.basename(path), "type": "file", "path": path, **shown} for path in written]
    )


async def _write_parts(request: web.Request, live: LiveSandbox, account: Account) -> list[str]:
    written: list[str] = []
    async for part in _parts(request):
        if not isinstance(part, BodyPartReader) or part.name != "file":
            continue
        name = request.query.get("path", "")
        if not name:
            # aiohttp's own parser removes the first slash of the name, which is a path here.
            quoted = _FILE_NAME.search(part.headers.get("Content-Disposition", ""))
            name = _ESCAPED.sub(r"\1", quoted[1]) if quoted else part.filename or ""
        if not name:
            raise ApiError(400, "a part has no filename, and the query has no path")
        path = account.resolve(name)
        if path in written:
            raise ApiError(400, f"you cannot upload multiple files to the same path {path!r} in one upload request")
        await _write(request, live, account, path, _part_chunks(part))
        written.append(path)
    return written


async def _parts(request: web.Request) -> AsyncIterator[object]:
    """Yield the parts of a multipart body. Raises ApiError 400 for a malformed one."""
    try:
        parts = await request.multipart()
        while (part := await parts.next()) is not None:
            yield part
    except (ValueError, HttpProcessingError) as error:
        raise ApiError(400, f"malformed multipart body: {error}") from error


async def _part_chunks(part: BodyPartReader) -> AsyncIterator[bytes]:
    while chunk := await part.read_chunk(_CHUNK_BYTES):
        yield chunk


async def _may(request: web.Request, live: LiveSandbox, account: Account, check: str, path: str) -> bool:
    """Return False if the request names no user, and the default user lacks the right: root acts then, as in E2B."""
    if account.name == _ROOT or request.query.get("username"):
        return True
    command = f"set -- {shlex.quote(path)}; {check}"
    result = await live.handle.exec(command, user=account.name, cwd="/", timeout_s=_CHECK_TIMEOUT_S)
    return result.exit_code == 0


async def _write(
    request: web.Request, live: LiveSandbox, account: Account, path: str, content: AsyncIterator[bytes]
) -> None:
    if await _may(request, live, account, _MAY_WRITE, path):
        process = await _start(live, account.name, _WRITE, path, stdin=True)
    else:
        process = await _start(live, _ROOT, _WRITE_FOR, path, account.name, stdin=True)
    transfer = _Transfer(process)
    try:
        # If the writer has ended early, its exit code says why.
        with suppress(SandboxFileError):
            async for chunk in content:
                await process.write_stdin(chunk)
        await process.close_stdin()
        async for _ in transfer.chunks():
            pass
        await transfer.check()
    except BaseException:
        await asyncio.shield(process.signal(_SIGKILL))
        raise
