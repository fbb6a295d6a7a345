"""Serves the page and the metrics of a run: as a plain process without Ray, or for the observer of the run.

Invariants:
- It listens on other addresses than loopback only with a key of the user's.
- It ends on SIGTERM or SIGINT, and follows nobody.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson
from aiohttp import web

from headrace.actors.errors import ConfigError
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.services.local_server import key_of
from headrace.actors.telemetry.page.app import build_app
from headrace.actors.telemetry.prometheus.exposition import PATH, Exposition, metrics_handler
from headrace.buffer.primitives.durable_files import replace_file

CLOSE_S: Final = 0.5
"""Time for the requests in progress to end when the server stops."""
TOKEN_BYTES: Final = 32
DANGER: Final = (
    "other hosts could read the run, with everything that its agents wrote; name a private file with a token"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """Where to listen. Without `key_file`, a token is made that only the printed URL and the address file have; a
    server that starts again with the same address file keeps it."""

    host: str = "127.0.0.1"
    port: int = 0
    key_file: Path | None = None
    address_file: Path | None = None

    def known_token(self) -> str | None:
        """Return the token of the server that wrote the address file before; None if there was none."""
        if self.address_file is None or not self.address_file.exists():
            return None
        try:
            token = orjson.loads(self.address_file.read_bytes())["token"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return token if isinstance(token, str) and token else None


@asynccontextmanager
async def page_server(run_dir: Path, options: ObserveOptions) -> AsyncIterator[str]:
    """Serve the page and the metrics of a run during the block; gives the URL, whose fragment has the token unless that
    is a key of the user's. Raises ConfigError if the address cannot be used, and RunMissing."""
    key = key_of(options.key_file, options.host, danger=DANGER)
    token = key or options.known_token() or secrets.token_urlsafe(TOKEN_BYTES)
    app = build_app(run_dir, token, hosts=(options.host, socket.gethostname()))
    app.router.add_get(PATH, metrics_handler(Exposition(RunDirectory.at(run_dir))))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, options.host, options.port).start()
        except OSError as error:
            raise ConfigError(
                f"--host {options.host} --port {options.port}: {error.strerror}; choose another port or 0"
            ) from error
        host, port = runner.addresses[0][:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        if options.address_file is not None:
            document = orjson.dumps({"url": url, "pid": os.getpid(), "token": token})
            replace_file(options.address_file, document, mode=0o600)
        yield url if key else f"{url}#token={token}"
    finally:
        await runner.cleanup()


async def observe(run_dir: Path, options: ObserveOptions, announce: Callable[[str], None]) -> None:
    """Serve the page of a run until a signal. `announce` is called with the URL. Raises ConfigError if the address
    cannot be used, and RunMissing."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with page_server(run_dir, options) as url:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        announce(url)
        await ended.wait()
