"""One process of the standalone gateway, `headrace serve gateway`: a token-exact proxy in front of engines that are run
by others.

Invariants:
- The base URL is announced once the gateway is listening.
- The admin token is read from a file. If the file is missing, it is created with permissions for its owner only. The
  token is never printed.
- Weight versions that are not `epoch.step` are reported as `0.0`, since such engines use version names of their own.
- A garbage collection that the interpreter triggers visits at most `YOUNG_OBJECTS * (YOUNG_ROUNDS + 2)` objects; the
  live sessions, which are millions of objects, are not traversed during a burst of requests. Visiting one of their
  objects then would take some microseconds, because everything it refers to has left the processor's caches.
- A full collection runs every `FULL_EVERY_S` seconds. Objects that existed before the process started serving are never
  collected. There are few cycles among old objects, and none of them lives longer than that interval.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.processes.engine_keys import EngineKeyFiles, read_engine_key
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from headrace.sandboxes.errors import SecretRefused
from headrace.sandboxes.host.key_files import make_key, read_key
from headrace.serve.gateway.errors import OptionRefused
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.http.options import StandaloneOptions
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable

FOREIGN_VERSION: Final = PolicyVersion(0, 0)
_EXPIRE_EVERY_S: Final = 10.0


YOUNG_OBJECTS: Final = 1_500
YOUNG_ROUNDS: Final = 0
"""Number of collections of the youngest generation before one that includes the next generation."""
FULL_EVERY_S: Final = 600.0
_NEVER: Final = 2**31 - 1


@asynccontextmanager
async def portioned_collections(*, full_every_s: float = FULL_EVERY_S) -> AsyncIterator[None]:
    """Apply the garbage collection settings for the duration of the block. They affect the whole process, so the
    process must do nothing else."""
    usual = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, _NEVER)

    async def collect_all() -> None:
        while True:
            await asyncio.sleep(full_every_s)
            gc.collect()

    collecting = asyncio.create_task(collect_all())
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(*usual)
        gc.unfreeze()


async def serve_one(
    options: StandaloneOptions,
    announce: Callable[[str], None],
    until: Callable[[Gateway], Coroutine[Any, Any, None]],
) -> None:
    """Serve until `until` returns. `announce` is called with the base URL. Raises OptionRefused, PolicyError."""
    routes = routes_of(options)
    config = GatewayConfig(
        tokenizer_dir=options.tokenizer,
        session_log_dir=options.state,
        export_dir=options.export,
        export_form=options.export_form,
        engine_keys=EngineKeyFiles(own=options.engine_key_file),
        place=options.place,
        advertise_url=options.advertise_url,
        parser=options.parser,
        max_context_tokens=options.max_context_tokens or await context_length(options),
        foreign_version=str(FOREIGN_VERSION),
        # Longer than the default: other users load these engines too, so that some seconds of queueing are normal.
        held_after_s=10.0,
    )
    gateway = Gateway(config, read_admin_token(options.admin_token_file))
    try:
        try:
            url = await gateway.start(options.host, options.port)
        except OSError as error:
            if error.filename is not None:
                raise OptionRefused(f"--state {options.state}: {error.filename}: {error.strerror}") from error
            raise cannot_listen(options, error) from error
        await gateway.set_engines(RoutingTable(version=1, engines=routes))
        async with portioned_collections():
            announce(url)
            ending = asyncio.create_task(until(gateway))
            try:
                while not ending.done():
                    # This call also closes the sessions that were not finished in time.
                    await gateway.in_flight()
                    await asyncio.wait({ending}, timeout=_EXPIRE_EVERY_S)
            finally:
                ending.cancel()
    finally:
        await gateway.stop()


def cannot_listen(options: StandaloneOptions, error: OSError) -> OptionRefused:
    where = f"--host {options.host} --port {options.port}"
    return OptionRefused(f"{where}: cannot listen there: {error.strerror}; choose another (0: a free port)")


def routes_of(options: StandaloneOptions) -> tuple[EngineRoute, ...]:
    """Return the routes to the engines. Raises OptionRefused."""
    urls, shown = options.engine_urls, ",".join(options.engine_urls)
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise OptionRefused(f"--engine {shown}: not a list of base URLs of SGLang servers, separated by commas")
    if len(set(urls)) < len(urls):
        raise OptionRefused(f"--engine {shown}: duplicate URL; name each engine once")
    return tuple(EngineRoute(engine_id=EngineId(f"engine-{index}"), url=url) for index, url in enumerate(urls))


async def context_length(options: StandaloneOptions) -> int:
    """Return the engines' smallest context length. Raises EngineError if one of them does not answer, OptionRefused."""
    routes, key = routes_of(options), read_engine_key(options.engine_key_file, "--engine-key-file")
    config = SGLangConfig(vocab_size=1, foreign_version=str(FOREIGN_VERSION))
    async with aiohttp.ClientSession() as http:
        engines = [SGLangEngine(route.engine_id, route.url, http, config, key=key) for route in routes]
        try:
            async with asyncio.TaskGroup() as group:
                asking = [group.create_task(engine.info()) for engine in engines]
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
    return min(task.result().max_context_tokens for task in asking)


def read_admin_token(path: Path) -> str:
    """Return the token in the file; if the file is missing, create it with a new token. Raises OptionRefused, also if
    other users can read the file."""
    try:
        make_key(path)
        return read_key(path, "--admin-token-file")
    except OSError as error:
        raise OptionRefused(f"--admin-token-file {path}: {error}") from error
    except SecretRefused as error:
        raise OptionRefused(str(error)) from error
