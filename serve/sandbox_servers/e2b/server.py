"""E2B server: a single aiohttp application with control plane and envd, over any provider.

Invariants:
- Without keys it binds to loopback only.
- It serves requests only after the sandboxes of an earlier server have been recovered.
- A shutdown first refuses new connections, and then ends streams, tasks and, unless they are to be kept, sandboxes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, Self

from aiohttp import web

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.base import SandboxProvider
from headrace.sandboxes.errors import SandboxError, SpecRefused
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.serve.sandbox_servers.e2b.control import ControlPlane
from headrace.serve.sandbox_servers.e2b.envd import Authentication, Envd
from headrace.serve.sandbox_servers.e2b.files import Files, allow_all_origins
from headrace.serve.sandbox_servers.e2b.filesystem_service import FilesystemService, WatchService
from headrace.serve.sandbox_servers.e2b.observation import ObservationRoutes
from headrace.serve.sandbox_servers.e2b.ports import Ports, check_domain
from headrace.serve.sandbox_servers.e2b.process_service import ProcessService
from headrace.serve.sandbox_servers.e2b.template_routes import TemplateRoutes
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap
from headrace.serve.sandbox_servers.e2b_state.keys import ApiKeys
from headrace.serve.sandbox_servers.e2b_state.lifecycle import Sandboxes, recover
from headrace.serve.sandbox_servers.e2b_state.limits import SandboxLimits
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import LiveSandbox
from headrace.serve.sandbox_servers.e2b_state.table import SandboxTables
from headrace.serve.sandbox_servers.e2b_state.templates import MAX_BYTES, Templates

_SHUTDOWN_S: Final = 1.0
"""Time that streams are given to end at shutdown."""
_BACKLOG: Final = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Address, keys and state of a server. Port 0 selects any free port."""

    host: str = "127.0.0.1"
    port: int = 0
    keys: ApiKeys = field(default_factory=lambda: ApiKeys(None))
    images: ImageMap = field(default_factory=ImageMap)
    state_folder: Path | None = None
    """Folder that contains the table; None for a table in memory."""
    max_template_bytes: int = MAX_BYTES
    """Bytes of the images of one key's templates."""
    keep_sandboxes: bool = False
    """Keep the sandboxes alive at shutdown, for the next server that uses this folder."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """The provider's limits of a sandbox that asks for none, which lists show."""
    domain: str = ""
    """Domain of the host names of ports, `<port>-<id>.<domain>`, with its port if it has one. The default is
    `localhost:<port of this server>`, which browsers and many resolvers look up as this machine (RFC 6761)."""
    sudo: bool = True
    """Let the users of E2B sandboxes run commands as root with `sudo`."""
    serve_e2b: bool = True
    """Serve E2B's API; if false, only the additional parts are served."""


class ServerPart(Protocol):
    """Additional API that is served on the same port."""

    def open(self, stack: AsyncExitStack, tasks: ServerTasks) -> Iterable[web.RouteDef]:
        """Return the routes of this part. Resources on `stack` are closed after the tasks. Raises SpecRefused,
        SandboxError."""


class E2bServer:
    """An async context manager that serves while it is entered."""

    def __init__(
        self,
        backend: SandboxProvider,
        settings: ServerSettings | None = None,
        parts: Sequence[ServerPart] = (),
        builder: ImageBuilder | None = None,
    ) -> None:
        """`builder` builds templates with the sandboxes of the backend; without it the template routes answer 501."""
        self._backend = backend
        self._builder = builder
        self._settings = settings or ServerSettings()
        self._parts = parts
        self._stack = AsyncExitStack()
        self._port = 0

    @property
    def url(self) -> str:
        """The base URL of the control plane and envd."""
        host = self._settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._port}"

    async def __aenter__(self) -> Self:
        """Start serving. Raises SpecRefused (address, files), SandboxError."""
        host = self._settings.host
        try:
            loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
        except ValueError as error:
            raise SpecRefused(f"--host {host}: must be an IP address or localhost") from error
        if self._settings.keys.open_to_anyone and not loopback:
            raise SpecRefused(f"--host {host} is not loopback: set a key file with --keys")
        if self._settings.domain:
            await check_domain(self._settings.domain)
        async with AsyncExitStack() as stack:
            tasks = ServerTasks()
            sandboxes: Sandboxes | None = None
            routes = [route for part in self._parts for route in part.open(stack, tasks)]
            if self._settings.serve_e2b:
                tables = SandboxTables(self._settings.state_folder)
                stack.callback(tables.close)
                await stack.enter_async_context(tasks)
                sandboxes = Sandboxes(
                    self._backend,
                    tables,
                    self._settings.images,
                    tasks,
                    sudo=self._settings.sudo,
                    defaults=self._settings.limits,
                )
                templates = None
                if self._builder is not None:
                    most = self._settings.max_template_bytes
                    templates = Templates(sandboxes, self._builder, self._settings.images, most)
                    await self._builder.prepare()
                await recover(sandboxes)
                stack.push_async_callback(self._end_sandboxes, sandboxes)
                tasks.start(sandboxes.run())
                application = make_application(sandboxes, self._settings.keys, templates)
            else:
                await stack.enter_async_context(tasks)
                application = _bare_application()
            application.add_routes(routes)
            await self._listen(application, stack)
            if sandboxes is not None:
                sandboxes.domain = self._settings.domain or f"localhost:{self._port}"
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _listen(self, application: web.Application, stack: AsyncExitStack) -> None:
        # A client that disconnects cancels its handler, so that a command no longer waits for this reader.
        runner = web.AppRunner(
            application, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, handle_signals=False
        )
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        family = socket.AF_INET6 if ":" in self._settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._settings.host, self._settings.port))
        except OSError as error:
            listener.close()
            raise SpecRefused(f"cannot listen on {self._settings.host}:{self._settings.port}: {error}") from error
        self._port = listener.getsockname()[1]
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()

    async def _end_sandboxes(self, sandboxes: Sandboxes) -> None:
        if self._settings.keep_sandboxes:
            return

        async def kill(live: LiveSandbox) -> None:
            # A sandbox that cannot be killed now ends with the provider's lease.
            with suppress(SandboxError):
                await sandboxes.kill(live)

        async with asyncio.TaskGroup() as group:
            for live in sandboxes.all():
                group.create_task(kill(live))


def _bare_application(*middlewares: Any) -> web.Application:
    return web.Application(middlewares=[_json_errors, *middlewares], client_max_size=0)


def make_application(sandboxes: Sandboxes, keys: ApiKeys, templates: Templates | None = None) -> web.Application:
    """Return an application with all routes, also for use in another program."""
    access, envd = Authentication(sandboxes, keys), Envd(sandboxes)
    application = _bare_application(Ports(sandboxes, envd).middleware)
    observation = ObservationRoutes(sandboxes)
    if templates is not None:
        # Before the routes that refuse whatever else there is about templates.
        application.add_routes(TemplateRoutes(templates, observation).routes(access))
    application.add_routes(observation.routes(access))
    application.add_routes(ControlPlane(sandboxes).routes(access))
    application.add_routes(ProcessService(sandboxes.tasks).routes(envd))
    application.add_routes(FilesystemService().routes(envd))
    application.add_routes(WatchService(sandboxes.tasks).routes(envd))
    application.add_routes(Files(sandboxes, envd).routes())
    application.router.add_get("/health", envd.health)
    application.on_response_prepare.append(allow_all_origins)
    return application


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert errors for unknown routes and methods, and internal errors of this server, to error documents."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return ApiError(error.status, error.reason).response()
    except ConnectionError:
        # The client has disconnected.
        raise
    except Exception:
        logger.exception("%s %s failed", request.method, request.path)
        if request.writer.output_size:
            raise
        return ApiError(500, "internal error of the server", error_code="internal_server_error").response()
