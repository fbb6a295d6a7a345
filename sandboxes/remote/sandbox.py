"""Client of a sandbox behind an exec server, which any process can use with a ref.

Invariants: idempotent requests are repeated after a lost response; an exec without exec_id, and a signal other than
SIGKILL, are not. When the connection of an exec without exec_id is lost, the server kills its process tree.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from aiohttp import WSMsgType

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.base import (
    MAX_REMOTE_OUTPUT_BYTES,
    ExecCommand,
    ExecResult,
    HostPort,
    ImageRef,
    Output,
    Sandbox,
    SandboxId,
    SandboxRef,
    SandboxUsage,
    SpawnCommand,
    Stream,
    TerminalSize,
)
from headrace.sandboxes.errors import (
    ExecResultLost,
    ProviderUnreachable,
    SandboxError,
    SandboxFileError,
    SandboxGone,
    SpecRefused,
)
from headrace.sandboxes.local.exposed import relay
from headrace.sandboxes.remote.file_bundle import SPOOL_BYTES, pack_files
from headrace.sandboxes.remote.http import RemoteHttp
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.sandboxes.remote.tunnel import WebSocket, carry
from headrace.sandboxes.retry import RetryConfig, full_jitter_s

_BATCH_BYTES: Final = 32 << 20
_CHUNK_BYTES: Final = 1 << 18
_SIGKILL: Final = 9
_PIECE_BYTES: Final = 1 << 18
_BACKLOG: Final = 64
logger = logging.getLogger(__name__)


class RemoteProcess:
    """A spawned command, made by `RemoteSandbox.spawn`."""

    def __init__(self, url: str, secret: str, http: RemoteHttp) -> None:
        self.pid = 0
        self._url = url
        self._secret = secret
        self._http = http
        self._sent_bytes = 0
        self._writing = asyncio.Lock()

    async def _request(self, method: str, path: str, *, repeatable: bool = True, **options: Any) -> Any:
        return await self._http.call(method, self._url + path, self._secret, repeatable=repeatable, **options)

    async def output(self) -> AsyncIterator[Output]:
        """See `Process.output`. The server buffers up to 256 KiB."""
        taken, ended = 0, False
        while not ended:
            try:
                answer = await self._request("GET", "/output", query={"after": str(taken)})
            except (SandboxGone, ExecResultLost):
                # `wait` raises the reason.
                return
            ended = answer["ended"]
            for stream, data in answer["pieces"]:
                taken += 1
                yield Output(stream=Stream(stream), data=base64.b64decode(data))

    async def write_stdin(self, data: bytes) -> None:
        async with self._writing:
            for start in range(0, len(data), _PIECE_BYTES):
                piece = data[start : start + _PIECE_BYTES]
                body = {"offset": self._sent_bytes, "data": base64.b64encode(piece).decode()}
                await self._request("POST", "/stdin", body=body)
                self._sent_bytes += len(piece)

    async def close_stdin(self) -> None:
        await self._request("DELETE", "/stdin")

    async def signal(self, number: int) -> None:
        """See `Process.signal`. After a lost response only SIGKILL is repeated."""
        kills = number == _SIGKILL
        await self._request("POST", "/signal", body={"number": number}, repeatable=kills, teardown=kills)

    async def resize(self, size: TerminalSize) -> None:
        await self._request("POST", "/size", body={"rows": size.rows, "columns": size.columns})

    async def wait(self) -> int:
        """See `Process.wait`. Raises ExecResultLost if the server was restarted."""
        while (code := (await self._request("GET", "/end"))["exit_code"]) is None:
            pass
        return int(code)


def sandbox_url(ref: SandboxRef) -> str:
    return f"{ref.endpoint}/v1/sandboxes/{quote(ref.id, safe='')}"


class RemoteSandbox(Sandbox):
    """A remote sandbox, made by `RemoteProvider.attach`."""

    def __init__(
        self,
        ref: SandboxRef,
        http: RemoteHttp,
        later: Callable[[Coroutine[Any, Any, Any]], None],
        killed: Callable[[SandboxId], None],
    ) -> None:
        self._ref = ref
        self._http = http
        self._later = later
        self._killed = killed
        self._url = sandbox_url(ref)

    @property
    def id(self) -> SandboxId:
        return self._ref.id

    async def _request(self, method: str, path: str, *, repeatable: bool = True, **options: Any) -> Any:
        return await self._http.call(method, self._url + path, self._ref.secret, repeatable=repeatable, **options)

    async def run_command(self, command: ExecCommand) -> ExecResult:
        """See `Sandbox.exec`. A command with an exec_id keeps running when its caller is cancelled."""
        stdin = None if command.stdin is None else base64.b64encode(command.stdin).decode()
        most = min(command.max_output_bytes, MAX_REMOTE_OUTPUT_BYTES)
        body = {**asdict(command), "stdin": stdin, "max_output_bytes": most}
        answer = await self._request("POST", "/exec", body=body, repeatable=command.exec_id is not None)
        stdout, stderr = base64.b64decode(answer.pop("stdout")), base64.b64decode(answer.pop("stderr"))
        return ExecResult(stdout=stdout, stderr=stderr, **answer)

    async def start_process(self, command: SpawnCommand) -> RemoteProcess:
        """See `Sandbox.spawn`."""
        spawn_id = secrets.token_hex(16)
        body = {"spawn_id": spawn_id, **asdict(command)}
        process = RemoteProcess(f"{self._url}/processes/{spawn_id}", self._ref.secret, self._http)
        try:
            process.pid = (await self._request("POST", "/processes", body=body))["pid"]
        except asyncio.CancelledError:
            self._later(process.signal(_SIGKILL))
            raise
        return process

    async def read(self, path: str, *, user: str = "root", max_bytes: int) -> bytes:
        query = {"path": path, "user": user, "max_bytes": str(max_bytes)}
        data: bytes = await self._request("POST", "/read", query=query)
        return data

    async def write(self, path: str, data: bytes | Path, *, user: str = "root") -> None:
        query = {"path": path, "user": user}
        if isinstance(data, bytes):
            await self._request("PUT", "/file", query=query, content=lambda: data)
            return
        try:
            size = (await asyncio.to_thread(data.stat)).st_size
        except OSError as error:
            raise SandboxFileError(f"{data}: {error.strerror}") from error
        # A small file is read at once, so that its length is known; a large one while it is sent.
        source = data.read_bytes if size <= SPOOL_BYTES else lambda: _chunks(data)
        await self._request("PUT", "/file", query=query, content=source)

    async def write_many(self, files: Mapping[str, bytes], *, user: str = "root") -> None:
        """See `Sandbox.write_many`. Makes one request per 32 MiB."""
        batch: dict[str, bytes] = {}
        size = 0
        for path, data in files.items():
            if batch and size + len(data) > _BATCH_BYTES:
                await self._write_batch(batch, user)
                batch, size = {}, 0
            batch[path] = data
            size += len(data)
        await self._write_batch(batch, user)

    async def _write_batch(self, batch: Mapping[str, bytes], user: str) -> None:
        if len(batch) == 1:
            [(path, data)] = batch.items()
            await self.write(path, data, user=user)
        elif batch:
            packed = pack_files(batch)
            await self._request("PUT", "/files", query={"user": user}, content=lambda: packed)

    async def freeze(self) -> None:
        await self._request("POST", "/freeze", teardown=True)

    async def pause(self) -> None:
        await self._request("POST", "/pause", teardown=True)

    async def resume(self) -> None:
        await self._request("POST", "/resume", teardown=True)

    async def snapshot(self) -> ImageRef:
        """See `Sandbox.snapshot`. The image is stored by the server."""
        return ImageRef((await self._request("POST", "/snapshot"))["image"])

    def expose(self, port: int, target: HostPort, prefix: str) -> AbstractAsyncContextManager[None]:
        """See `Sandbox.expose`. The service is on this host; requests pass through the exec server."""
        url, secret = f"{self._url}/expose", self._ref.secret
        return expose(self._http, url, secret, port=port, target=target, prefix=prefix)

    async def usage(self) -> SandboxUsage:
        return SandboxUsage(**await self._request("GET", "/usage", teardown=True))

    async def renew(self, ttl_s: float) -> None:
        await self._request("POST", "/renew", body={"ttl_s": ttl_s}, teardown=True)

    async def kill(self) -> None:
        await self._request("DELETE", "", teardown=True)
        self._killed(self._ref.id)


async def _chunks(path: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(path.open, "rb") as file:
        while chunk := await asyncio.to_thread(file.read, _CHUNK_BYTES):
            yield chunk


@asynccontextmanager
async def expose(
    http: RemoteHttp, url: str, secret: str, *, port: int, target: HostPort, prefix: str
) -> AsyncIterator[None]:
    """See `Sandbox.expose`. Raises the server's typed error, ProviderUnreachable."""
    with tempfile.TemporaryDirectory(prefix="headrace-expose-") as folder:
        path = str(Path(folder) / "s")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(path)
        listener.listen(_BACKLOG)
        tunnel = _ReopeningTunnel(http, url, secret, {"port": str(port), "prefix": prefix}, path)
        async with AsyncExitStack() as stack:
            stack.callback(listener.close)
            tasks = await stack.enter_async_context(ServerTasks())
            opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            tasks.start(tunnel.run(opened))
            await opened
            await stack.enter_async_context(relay(listener, target, prefix))
            yield


class _ReopeningTunnel:
    """A tunnel that is reopened when it breaks; requests that were in progress are lost. Only this process connects to
    the service, and only for requests below the prefix, so the other host has no more access than the sandbox."""

    def __init__(self, http: RemoteHttp, url: str, secret: str, query: dict[str, str], path: str) -> None:
        self._http = http
        self._url = url
        self._secret = secret
        self._query = query
        self._path = path

    async def run(self, opened: asyncio.Future[None]) -> None:
        """Run the tunnel. Resolves `opened` once the tunnel is first open, or with the error if opening fails."""
        try:
            await self._once(opened)
        except SandboxError as error:
            if not opened.done():
                opened.set_exception(error)
                return
        config, attempt = RetryConfig(), 0
        while True:
            logger.warning("the tunnel to %s broke and is being reopened", self._url)
            await asyncio.sleep(full_jitter_s(config, attempt))
            attempt += 1
            try:
                await self._once(opened)
                attempt = 0
            except (ProviderUnreachable, SpecRefused):
                # Still unreachable, or the old tunnel holds the port because the server has not noticed its end yet.
                continue
            except SandboxError as error:
                logger.warning("the tunnel to %s could not be reopened: %s", self._url, error)
                return

    async def _once(self, opened: asyncio.Future[None]) -> None:
        async with self._http.socket(self._url, self._secret, self._query) as socket, ServerTasks() as connections:
            if not opened.done():
                opened.set_result(None)
            async for message in socket:
                if message.type is not WSMsgType.TEXT:
                    return
                connections.start(self._connect(socket, message.json()["connection"]))

    async def _connect(self, tunnel: WebSocket, name: str) -> None:
        """Carry one connection of the sandbox. If it cannot be reached, the tunnel is reopened: the connection would
        wait for ever."""
        try:
            async with self._http.socket(self._url, self._secret, {"connection": name}, heartbeat=False) as socket:
                await carry(socket, *await asyncio.open_unix_connection(self._path))
        except SandboxError as error:
            logger.warning("a connection through the tunnel to %s is lost: %s", self._url, error)
            await tunnel.close()
