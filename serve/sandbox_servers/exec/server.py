"""The program of `headrace serve sandbox`.

Invariants:
- It prints one line with its URL once it is listening; SIGTERM and SIGINT shut it down. With a state folder, the
  launcher outlives a server that is killed, and the next server that uses the folder adopts the launcher and its
  sandboxes. A shutdown ends them, except with `keep_sandboxes`.
- Both APIs (`exec` and `dropin`) share one table, but each sees only its own sandboxes.
"""

from __future__ import annotations

import asyncio
import hashlib
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from aiohttp import web
from pydantic import ValidationError

from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.base import Network, SandboxProvider
from headrace.sandboxes.errors import SpecRefused
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.local.launcher_process import runtime_folder
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.sandboxes.remote.multi_host import MultiHostProvider, remote_hosts
from headrace.sandboxes.remote.tasks import ServerTasks
from headrace.sandboxes.retry import RetryConfig
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import checked, load_images
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys
from headrace.serve.sandbox_servers.e2b_state.limits import SandboxLimits, parse_size
from headrace.serve.sandbox_servers.exec.dropin import DropIn
from headrace.serve.sandbox_servers.exec.evaluations import ApplyPatch
from headrace.serve.sandbox_servers.exec.options import ServeOptions
from headrace.serve.sandbox_servers.exec.registry import LeasedSandboxTable, SandboxRegistry
from headrace.serve.sandbox_servers.exec.routes import ExecApi

_Provider = LocalProvider | MultiHostProvider

E2B: Final = "e2b"
_HOST_RETRIES: Final = RetryConfig(boot_attempts=2)
"""Few retries, because this server's clients repeat their requests themselves."""
APIS: Final = frozenset({E2B, "exec", "dropin"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecPart:
    """A server part that serves `apis`: `exec`, `dropin` or both. `lease_s` is the lease of a drop-in container."""

    provider: SandboxProvider
    settings: ServerSettings
    apis: frozenset[str]
    lease_s: float
    apply_patch: ApplyPatch | None = None

    def open(self, stack: AsyncExitStack, tasks: ServerTasks) -> list[web.RouteDef]:
        """See `ServerPart.open`."""
        table = LeasedSandboxTable(self.settings.state_folder)
        stack.callback(table.close)
        keys, images = self.settings.keys, self.settings.images
        registries = {
            name: SandboxRegistry(self.provider, table, images, tasks, api=name) for name in sorted(self.apis)
        }
        if not self.settings.keep_sandboxes:
            for registry in registries.values():
                stack.push_async_callback(registry.end_all)
        routes: list[web.RouteDef] = []
        if "exec" in registries:
            routes += ExecApi(registries["exec"], keys).routes()
        if "dropin" in registries:
            routes += DropIn(registries["dropin"], keys, self.lease_s, self.apply_patch).routes()
        return routes


def serve(options: ServeOptions, announce: Callable[[str], None], apply_patch: ApplyPatch) -> None:
    """Serve until a signal. `announce` is called with the base URL. Raises SandboxError."""
    # A running command takes three descriptors, and the usual soft limit is 1024.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_serve(options, announce, apply_patch))


async def _serve(options: ServeOptions, announce: Callable[[str], None], apply_patch: ApplyPatch) -> None:
    apis = frozenset(name.strip() for name in options.api.split(","))
    if not apis <= APIS:
        raise SpecRefused(f"--api {options.api}: choose from {', '.join(sorted(APIS))}")
    if not 1 <= options.lease_s <= 24 * 3600:
        raise SpecRefused(f"--lease-s {options.lease_s}: must be from 1 to 86400 seconds")
    config = provider_config(options)
    if options.build_network not in (Network.NONE, Network.HOST):
        raise SpecRefused(f"--build-network {options.build_network}: choose none or host")
    settings = ServerSettings(
        serve_e2b=E2B in apis,
        host=options.host,
        port=options.port,
        keys=load_keys(options.keys),
        images=load_images(options.image_map, options.metadata_image_key),
        state_folder=options.state,
        keep_sandboxes=options.keep_sandboxes,
        limits=SandboxLimits(memory_bytes=config.memory_bytes, disk_bytes=config.layer_bytes, processes=config.pids),
        domain=options.domain,
        sudo=options.sudo,
    )
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with _provider(options, config) as provider:
        if isinstance(provider, LocalProvider):
            images = await asyncio.to_thread(checked, options.image_map, settings.images, provider.store)
            settings = replace(settings, images=images)
        part = ExecPart(
            provider=provider,
            settings=settings,
            apis=apis - {E2B},
            lease_s=options.lease_s,
            apply_patch=apply_patch,
        )
        builder = None
        if isinstance(provider, LocalProvider):
            builder = ImageBuilder(provider, network=Network(options.build_network))
        async with E2bServer(provider, settings, (part,) if part.apis else (), builder) as server:
            announce(server.url)
            await stopped.wait()


def provider_config(options: ServeOptions) -> LocalSandboxConfig:
    """Return the provider's configuration with the operator's limits. Raises SpecRefused."""
    chosen = {
        "max_sandboxes": options.max_sandboxes,
        "memory_bytes": parse_size(options.memory, "--memory") if options.memory else None,
        "layer_bytes": parse_size(options.disk, "--disk") if options.disk else None,
        "pids": options.processes,
        "open_files": options.files,
        "image_folder": options.image_folder,
    }
    given: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    if options.state is not None:
        # One folder for each state folder, with a path short enough for a socket.
        digest = hashlib.sha256(str(options.state.resolve()).encode()).hexdigest()[:16]
        given["stays_in"] = runtime_folder(None) / f"e2b-{digest}"
    given["allow_host_network"] = options.build_network == Network.HOST
    try:
        return LocalSandboxConfig.model_validate({**given, "max_live": options.max_sandboxes})
    except ValidationError as error:
        names = {"memory_bytes": "--memory", "layer_bytes": "--disk", "pids": "--processes", "open_files": "--files"}
        names["max_live"] = "--max-sandboxes"
        wrong = error.errors()[0]
        field = str(wrong["loc"][0])
        option = names.get(field, f"--{field.replace('_', '-')}")
        raise SpecRefused(f"{option} {wrong['input']}: {wrong['msg']}") from error


@asynccontextmanager
async def _provider(options: ServeOptions, config: LocalSandboxConfig) -> AsyncIterator[_Provider]:
    if options.keep_sandboxes and options.state is None:
        raise SpecRefused("--keep-sandboxes needs --state: without a table no server can find the sandboxes again")
    provider: _Provider
    if options.host_url:
        provider = MultiHostProvider(remote_hosts(options.host_url, options.host_key, _HOST_RETRIES))
    else:
        provider = LocalProvider(config)
    await provider.start()
    try:
        yield provider
    finally:
        if options.keep_sandboxes:
            await provider.detach()
        else:
            await provider.aclose()
