"""The HTTP server of a service that a run starts for itself, such as a retriever.

Invariants:
- It ends on SIGTERM or SIGINT, and by itself after `idle_s` without a request.
- It outlives whoever started it once it answers. Before that, it dies with its parent if `parent_pid` is set.
- It listens on other addresses than loopback only with a key.
- Its address file exists once it answers, and identifies the process and what it serves.
"""

from __future__ import annotations

import asyncio
import hmac
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import orjson
import psutil
from aiohttp import web
from aiohttp.typedefs import Handler

from headrace.actors.errors import ConfigError
from headrace.buffer.primitives.durable_files import replace_file
from headrace.policies.processes.engine_keys import is_loopback
from headrace.policies.processes.parent_death import die_with_parent, outlive_parent
from headrace.sandboxes.errors import SecretRefused
from headrace.sandboxes.host.key_files import read_key

CLOSE_S: Final = 0.5
"""Time for the requests in progress to end when the server stops."""


DANGER: Final = "other hosts could use the service; name a file with a key"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Command-line options of a server."""

    host: str = "127.0.0.1"
    port: int = 0
    address_file: Path | None = None
    idle_s: float = 1800.0
    key_file: Path | None = None
    parent_pid: int | None = None

    def prepare(self) -> str | None:
        """Prepare the process, before anything is loaded; return the key that requests must carry, or None. Raises
        ConfigError."""
        key = key_of(self.key_file, self.host, danger=DANGER)
        if self.parent_pid is not None:
            die_with_parent(self.parent_pid)
        return key


def key_of(key_file: Path | None, host: str, *, danger: str) -> str | None:
    """Return the key of the file, which the requests to a server on `host` must carry; None if it needs none. Raises
    ConfigError, also if other hosts could reach the server without a key: `danger` says what they could do, and what
    to name."""
    if key_file is None:
        if not is_loopback(host):
            raise ConfigError(f"--host {host}: {danger} (--key-file FILE), or bind 127.0.0.1")
        return None
    try:
        return read_key(key_file, "--key-file")
    except SecretRefused as error:
        raise ConfigError(str(error)) from error


class LocalServer(ABC):
    """A server; its subclass has the routes. `digest` identifies what it serves."""

    max_body_bytes: ClassVar[int] = 1 << 20

    def __init__(self, *, digest: str, key: str | None = None) -> None:
        self._digest, self._key = digest, key
        self._open_requests = 0
        self._idle_s = 0.0
        self._ended = asyncio.Event()
        self._idle: asyncio.Timeout | None = None

    @abstractmethod
    def _routes(self) -> Iterable[web.RouteDef]:
        """Return the routes beside /health."""

    async def serve(self, options: ListenOptions, announce: Callable[[str], None]) -> None:
        """Serve until a signal, or until no request has come for `idle_s`. `announce` is called with the base URL.
        Raises ConfigError if the address cannot be used."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        app = web.Application(middlewares=[self._counted], client_max_size=self.max_body_bytes)
        app.add_routes([*self._routes(), web.get("/health", self._health)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await runner.setup()
        try:
            site = web.TCPSite(runner, options.host, options.port)
            try:
                await site.start()
            except OSError as error:
                raise ConfigError(
                    f"--host {options.host} --port {options.port}: {error.strerror}; choose another port or 0"
                ) from error
            host, port = runner.addresses[0][:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            if options.parent_pid is not None:
                outlive_parent()
            if options.address_file is not None:
                replace_file(options.address_file, orjson.dumps(self._identity() | {"url": url}), mode=0o600)
            announce(url)
            with suppress(TimeoutError):
                async with asyncio.timeout(options.idle_s) as self._idle:
                    self._idle_s = options.idle_s
                    await self._ended.wait()
        finally:
            self._idle = None
            await runner.cleanup()

    def _identity(self) -> dict[str, object]:
        """Return what identifies this process and what it serves. A process id alone may be used again."""
        process = psutil.Process()
        return {"pid": process.pid, "started_s": process.create_time(), "sha256": self._digest}

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the key, and measure the idle time from the end of the last request."""
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
            return web.json_response({"error": "send the key as Authorization: Bearer KEY"}, status=401)
        self._open_requests += 1
        self._set_idle_end(None)
        try:
            return await handler(request)
        finally:
            self._open_requests -= 1
            if not self._open_requests:
                self._set_idle_end(asyncio.get_running_loop().time() + self._idle_s)

    def _set_idle_end(self, when: float | None) -> None:
        # Once it has expired it cannot be moved; the server is ending then.
        if self._idle is not None and not self._idle.expired():
            with suppress(RuntimeError):
                self._idle.reschedule(when)

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"} | self._facts() | self._identity())

    def _facts(self) -> dict[str, object]:
        """Return what /health says beside the identity."""
        return {}
