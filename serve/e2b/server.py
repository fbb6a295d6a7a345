"""The server: one aiohttp application of control plane and envd, over any provider, from its start to its end.

Invariants:
- Without keys it binds to loopback only.
- It serves only after what an earlier server left was looked through.
- It stops in order: no new connections, streams ended, tasks ended; its sandboxes stay or are killed, as asked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol, Self

from aiohttp import web

from headrace.sandboxes.errors import SandboxError, SpecRefused
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.e2b.access import Access
from headrace.serve.e2b.control import ControlPlane
from headrace.serve.e2b.envd import Envd
from headrace.serve.e2b.files import Files
from headrace.serve.e2b.filesystem_service import FilesystemService
from headrace.serve.e2b.observation import Observation
from headrace.serve.e2b.process_service import ProcessService
from headrace.serve.e2b.watch_service import WatchService
from headrace.serve.e2b_sandboxes.errors import ApiError
from headrace.serve.e2b_sandboxes.images import ImageMap
from headrace.serve.e2b_sandboxes.keys import ApiKeys
from headrace.serve.e2b_sandboxes.lifecycle import Sandboxes
from headrace.serve.e2b_sandboxes.recovery import recover
from headrace.serve.e2b_sandboxes.table import SandboxTable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from pathlib import Path
    from types import TracebackType

    from headrace.serve.e2b_sandboxes.lifecycle import Backend

_SHUTDOWN_S: Final = 1.0
"""How long streams may go on once the server was told to end."""
_BACKLOG: Final = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Where and for whom to serve. Port 0 is any free one."""

    host: str = "127.0.0.1"
    port: int = 0
    keys: ApiKeys = field(default_factory=lambda: ApiKeys(None))
    images: ImageMap = field(default_factory=ImageMap)
    state_folder: Path | None = None
    """Where the table is kept; in memory when None."""
    keep_sandboxes: bool = False
    """Leave the sandboxes alive at the end, for the next server of this folder."""
    serve_e2b: bool = True
    """False: only the parts that are given beside it."""


class ServerPart(Protocol):
    """Another API on the same port."""

    def open(self, stack: AsyncExitStack, tasks: ServerTasks) -> Iterable[web.RouteDef]:
        """Its routes. What it pushes to `stack` ends after the tasks. Raises SpecRefused, SandboxError."""
        ...


class E2bServer:
    """An async context manager: serves from entering it to leaving it."""

    def __init__(
        self, backend: Backend, settings: ServerSettings | None = None, parts: Sequence[ServerPart] = ()
    ) -> None:
        self._backend = backend
        self._settings = settings or ServerSettings()
        self._parts = parts
        self._stack = AsyncExitStack()
        self._port = 0

    @property
    def url(self) -> str:
        """The base URL of control plane and envd."""
        host = self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def __aenter__(self) -> Self:
        """Raises SpecRefused (address, files), SandboxError."""
        _check_address(self._settings)
        async with AsyncExitStack() as stack:
            tasks = ServerTasks()
            routes = [route for part in self._parts for route in part.open(stack, tasks)]
            application = await self._open_e2b(stack, tasks) if self._settings.serve_e2b else _bare_application()
            if not self._settings.serve_e2b:
                await stack.enter_async_context(tasks)
            application.add_routes(routes)
            await self._listen(application, stack)
            self._stack = stack.pop_all()
        return self

    async def _open_e2b(self, stack: AsyncExitStack, tasks: ServerTasks) -> web.Application:
        table = SandboxTable(self._settings.state_folder)
        stack.callback(table.close)
        await stack.enter_async_context(tasks)
        sandboxes = Sandboxes(self._backend, table, self._settings.images, tasks)
        await recover(sandboxes)
        stack.push_async_callback(self._end_sandboxes, sandboxes)
        tasks.start(sandboxes.run())
        return make_application(sandboxes, self._settings.keys)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _listen(self, application: web.Application, stack: AsyncExitStack) -> None:
        # A client that leaves cancels its handler: a command it followed is then free of it at once.
        runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, handle_signals=False
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            listener = _bind(self._settings.host, self._settings.port)
        except OSError as error:
            raise SpecRefused(f"cannot listen on {self._settings.host}:{self._settings.port}: {error}") from error
        self._port = listener.getsockname()[1]
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()

    async def _end_sandboxes(self, sandboxes: Sandboxes) -> None:
        if self._settings.keep_sandboxes:
            return
        async with asyncio.TaskGroup() as group:
            for live in sandboxes.everything():
                group.create_task(_kill(sandboxes.kill(live)))


async def _kill(killing: Awaitable[None]) -> None:
    # What cannot be ended now ends with the provider's lease.
    with suppress(SandboxError):
        await killing


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _check_address(settings: ServerSettings) -> None:
    try:
        loopback = settings.host == "localhost" or ipaddress.ip_address(settings.host).is_loopback
    except ValueError as error:
        raise SpecRefused(f"--host {settings.host}: give an IP address or localhost") from error
    if settings.keys.open_to_anyone and not loopback:
        raise SpecRefused(f"--host {settings.host} is not loopback: give a file of keys with --keys")


def _bare_application() -> web.Application:
    return web.Application(middlewares=[_json_errors], client_max_size=0)


def make_application(sandboxes: Sandboxes, keys: ApiKeys) -> web.Application:
    """All routes; useful alone to serve from another program."""
    application = _bare_application()
    access, envd = Access(sandboxes, keys), Envd(sandboxes)
    application.add_routes(Observation(sandboxes).routes(access))
    application.add_routes(ControlPlane(sandboxes).routes(access))
    application.add_routes(ProcessService(sandboxes.tasks).routes(envd))
    application.add_routes(FilesystemService().routes(envd))
    application.add_routes(WatchService(sandboxes.tasks).routes(envd))
    application.add_routes(Files(sandboxes, envd).routes())
    application.router.add_get("/health", envd.health)
    return application


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Unknown routes and methods, and our own defects, are answered like every other error."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return ApiError(error.status, error.reason).response()
    except ConnectionError:
        # The client is gone.
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        if request.writer.output_size:
            raise
        return ApiError(500, "internal error of the server", error_code="internal_server_error").response()
