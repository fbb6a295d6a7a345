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
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import SpecRefused
from headrace.sandboxes.local.launcher_process import runtime_folder
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.remote.multi_host import MultiHostProvider, remote_hosts
from headrace.sandboxes.retry import RetryConfig
from headrace.serve.e2b.server import E2bServer, ServerSettings
from headrace.serve.e2b_sandboxes.images import load_images
from headrace.serve.e2b_sandboxes.keys import load_keys
from headrace.serve.exec.parts import ExecPart

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from headrace.serve.exec.evaluations import ApplyPatch

    _Provider = LocalProvider | MultiHostProvider

E2B: Final = "e2b"
_HOST_RETRIES: Final = RetryConfig(boot_attempts=2)
"""The clients of this server repeat their requests themselves."""
APIS: Final = frozenset({E2B, "exec", "dropin"})


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
    apis: str = "e2b,exec,dropin"
    """Which of these to serve, with commas between them."""
    lease_s: float = 900.0
    """How long a container of the drop-in contract lives without a heartbeat or another request."""
    host_urls: tuple[str, ...] = ()
    """Other exec servers, whose sandboxes are lent instead of this host's."""
    host_key: Path | None = None
    """Holds the key of these."""
    apply_patch: ApplyPatch | None = None


def serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    """Serve until a signal. `announce` gets the base URL. Raises SandboxError."""
    # A followed command holds three descriptors, and the usual soft limit is 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_serve(options, announce))


async def _serve(options: ServeOptions, announce: Callable[[str], None]) -> None:
    apis = _apis(options)
    settings = ServerSettings(
        serve_e2b=E2B in apis,
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
    async with _provider(options) as provider:
        parts = _parts(options, apis, provider, settings)
        async with E2bServer(provider, settings, parts) as server:
            announce(server.url)
            await stopped.wait()


def _apis(options: ServeOptions) -> frozenset[str]:
    apis = frozenset(name.strip() for name in options.apis.split(","))
    if not apis <= APIS:
        raise SpecRefused(f"--api {options.apis}: choose from {', '.join(sorted(APIS))}")
    if not 1 <= options.lease_s <= 24 * 3600:
        raise SpecRefused(f"--lease-s {options.lease_s}: from 1 to 86400 seconds")
    return apis


def _parts(
    options: ServeOptions, apis: frozenset[str], provider: _Provider, settings: ServerSettings
) -> tuple[ExecPart, ...]:
    rest = apis - {E2B}
    part = ExecPart(
        provider=provider, settings=settings, apis=rest, lease_s=options.lease_s, apply_patch=options.apply_patch
    )
    return (part,) if rest else ()


@asynccontextmanager
async def _provider(options: ServeOptions) -> AsyncIterator[_Provider]:
    if options.keep_sandboxes and options.state is None:
        raise SpecRefused("--keep-sandboxes needs --state: without a table nobody finds them again")
    provider: _Provider
    match options.provider:
        case _ if options.host_urls:
            provider = MultiHostProvider(remote_hosts(options.host_urls, options.host_key, _HOST_RETRIES))
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
