"""Serves the page of a run as a plain process, without Ray.

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson
from aiohttp import web

from headrace.actors.errors import ConfigError
from headrace.actors.observer.app import build_app
from headrace.buffer.primitives.durable_files import replace_file
from headrace.policies.processes.engine_keys import is_loopback
from headrace.sandboxes.errors import SecretRefused
from headrace.sandboxes.key_files import read_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CLOSE_S: Final = 0.5
"""Time for the requests in progress to end when the server stops."""
TOKEN_BYTES: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveOptions:
    """Where to listen. Without `key_file`, a token is made that only the printed URL has."""

    host: str = "127.0.0.1"
    port: int = 0
    key_file: Path | None = None
    address_file: Path | None = None

    def read_key(self) -> str | None:
        """Return the key of the file. Raises ConfigError, also if other hosts could reach the page without one."""
        if self.key_file is None:
            if not is_loopback(self.host):
                raise ConfigError(
                    f"--host {self.host}: other hosts could read the run, with everything that its agents wrote; name "
                    "a private file with a token (--key-file FILE), or bind 127.0.0.1"
                )
            return None
        try:
            return read_key(self.key_file, "--key-file")
        except SecretRefused as error:
            raise ConfigError(str(error)) from error


async def observe(run_dir: Path, options: ObserveOptions, announce: Callable[[str], None]) -> None:
    """Serve the page of a run until a signal. `announce` is called with the URL, whose fragment has the token unless
    that is a key of the user's. Raises ConfigError if the address cannot be used, and RunMissing."""
    key = options.read_key()
    token = key or secrets.token_urlsafe(TOKEN_BYTES)
    app = build_app(run_dir, token, hosts=(options.host, socket.gethostname()))
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
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
        announce(url if key else f"{url}#token={token}")
        await ended.wait()
    finally:
        await runner.cleanup()
