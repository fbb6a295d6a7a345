"""`headrace gateway`: a token-exact proxy as a program, before engines that somebody else runs.

Invariants:
- It says where it listens once it does, in one line; SIGTERM and SIGINT end it in order.
- The admin token comes from a file, which is made, readable by its owner only, when it is not there; it is never
  printed.
- Weight versions that are not `epoch.step` are reported as `0.0`: other people's engines name theirs as they like.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp
import uvloop

from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.errors import EngineError
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.serve.errors import OptionRefused
from headrace.serve.gateway.config import GatewayConfig
from headrace.serve.gateway.garbage_collection import portioned_collections
from headrace.serve.gateway.gateway import Gateway
from headrace.serve.gateway.routing import EngineRoute, RoutingTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

FOREIGN_VERSION: Final = PolicyVersion(0, 0)
_EXPIRE_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneOptions:
    """What the command line said. `engine_urls` are SGLang servers; `admin_token_file` is made when it is missing."""

    engine_urls: tuple[str, ...]
    tokenizer_dir: Path
    admin_token_file: Path
    host: str = "127.0.0.1"
    port: int = 0
    advertise_url: str | None = None
    state: Path | None = None
    parser: str = "auto"
    max_context_tokens: int | None = None


def serve_gateway(options: StandaloneOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal. `announce` gets the base URL. Raises OptionRefused, PolicyError."""
    uvloop.run(_serve(options, announce))


async def _serve(options: StandaloneOptions, announce: Callable[[str], None]) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    routes = _routes(options.engine_urls)
    config = GatewayConfig(
        tokenizer_dir=options.tokenizer_dir,
        session_log_dir=options.state,
        advertise_url=options.advertise_url,
        parser=options.parser,
        max_context_tokens=options.max_context_tokens or await _context_of(routes),
        foreign_version=str(FOREIGN_VERSION),
        # Longer than the default: other users load these engines too, so that some seconds of queueing are normal.
        held_after_s=10.0,
    )
    gateway = Gateway(config, read_admin_token(options.admin_token_file))
    try:
        url = await _listening(gateway, options)
        await gateway.set_engines(RoutingTable(version=1, engines=routes))
        async with portioned_collections():
            announce(url)
            while not stopped.is_set():
                # Asking is what forgets sessions that nobody finished.
                await gateway.in_flight()
                await _wait(stopped, _EXPIRE_EVERY_S)
    finally:
        await gateway.stop()


async def _listening(gateway: Gateway, options: StandaloneOptions) -> str:
    """The base URL. Raises OptionRefused."""
    try:
        return await gateway.start(options.host, options.port)
    except OSError as error:
        if error.filename is not None:
            raise OptionRefused(f"--state {options.state}: {error.filename}: {error.strerror}") from error
        where = f"--host {options.host} --port {options.port}"
        raise OptionRefused(
            f"{where}: cannot listen there: {error.strerror}; choose another (0: a free port)"
        ) from error


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return


def _routes(urls: Sequence[str]) -> tuple[EngineRoute, ...]:
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise OptionRefused(f"--engine {','.join(urls)}: name the base URLs of SGLang servers, with commas between")
    if len(set(urls)) < len(urls):
        raise OptionRefused(f"--engine {','.join(urls)}: a URL stands there twice")
    return tuple(EngineRoute(engine_id=EngineId(f"engine-{index}"), url=url) for index, url in enumerate(urls))


async def _context_of(routes: Sequence[EngineRoute]) -> int:
    """The least that the engines take, which must answer. Raises EngineError when one does not."""
    config = SGLangConfig(vocab_size=1, foreign_version=str(FOREIGN_VERSION))
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        asking = [
            group.create_task(_context(SGLangEngine(route.engine_id, route.url, http, config))) for route in routes
        ]
    contexts = [task.result() for task in asking]
    for context in contexts:
        if isinstance(context, EngineError):
            raise context
    return min(context for context in contexts if isinstance(context, int))


async def _context(engine: SGLangEngine) -> int | EngineError:
    """An error as a value: a raised one would come out of the group as another."""
    try:
        return (await engine.info()).max_context_tokens
    except EngineError as error:
        return error


def read_admin_token(path: Path) -> str:
    """The token in the file; a new one when there is no file. Raises OptionRefused."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionRefused(f"--admin-token-file {path}: {error}") from error
    if len(token) < 16:
        raise OptionRefused(f"--admin-token-file {path}: the token must have at least 16 characters")
    return token
