"""`headrace sandbox serve`: the server as a program, from its options to its signal.

Invariants: it says where it listens once it does, in one line; SIGTERM and SIGINT end it in order. With a state folder
the launcher outlives a server that was killed, and the next server of that folder adopts it with its sandboxes; an
orderly end ends them, unless they are to be kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import resource
import signal
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.sandboxes.e2b_server.images import load_images
from headrace.sandboxes.e2b_server.keys import load_keys
from headrace.sandboxes.e2b_server.server import E2bServer, ServerSettings
from headrace.sandboxes.errors import SpecRefused
from headrace.sandboxes.local.launcher_process import runtime_folder
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from headrace.sandboxes.e2b_server.lifecycle import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the command line said."""

    host: str
    port: int
    provider: str
    image_map: Path | None = None
    metadata_image_key: str = ""
    keys: Path | None = None
    state: Path | None = None
    keep_sandboxes: bool = False


def serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal. `announce` gets the base URL. Raises SandboxError."""
    # A followed command holds three descriptors, and the usual soft limit is 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_serve(options, announce))


async def _serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        keys=load_keys(options.keys),
        images=load_images(options.image_map, options.metadata_image_key),
        state_folder=options.state,
        keep_sandboxes=options.keep_sandboxes,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with _provider(options) as provider, E2bServer(provider, settings) as server:
        announce(server.url)
        await stopped.wait()


@asynccontextmanager
async def _provider(options: ServeOptions) -> AsyncIterator[Backend]:
    if options.keep_sandboxes and options.state is None:
        raise SpecRefused("--keep-sandboxes needs --state: without a table nobody finds them again")
    match options.provider:
        case "local":
            stays_in = None if options.state is None else _launcher_folder(options.state)
            provider = LocalProvider(LocalSandboxConfig(stays_in=stays_in))
        case "subprocess":
            raise SpecRefused("--provider subprocess cannot spawn commands, which E2B's clients need: use local")
        case name:
            raise SpecRefused(f"--provider {name}: local is what there is")
    await provider.start()
    try:
        yield provider
    finally:
        await (provider.detach() if options.keep_sandboxes else provider.aclose())


def _launcher_folder(state: Path) -> Path:
    """One for each state folder, with a path short enough for a socket."""
    digest = hashlib.sha256(str(state.resolve()).encode()).hexdigest()[:16]
    return runtime_folder(None) / f"e2b-{digest}"
