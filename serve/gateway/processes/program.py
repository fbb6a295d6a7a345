"""The standalone gateway, `headrace serve gateway`, in one process or in several.

Invariants:
- The base URL is printed on one line once the gateway is listening; SIGTERM and SIGINT shut it down gracefully.
- With several processes, SIGHUP replaces them one after the other.
- The ports of several processes are kept in the folder of the sessions, if there is one.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import orjson
import uvloop
from aiohttp import web

from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.primitives.exit_stack import AsyncExitStack
from headrace.sandboxes.host.http_relay import relay_session
from headrace.serve.gateway.errors import OptionRefused
from headrace.serve.gateway.http.connections import ConnectionSettings, listen
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.http.options import StandaloneOptions
from headrace.serve.gateway.http.placement import most_processes, stable_ports
from headrace.serve.gateway.http.standalone import (
    cannot_listen,
    context_length,
    read_admin_token,
    serve_one,
)
from headrace.serve.gateway.processes.front import DEFAULTS, Front
from headrace.serve.gateway.processes.member import Member

logger = logging.getLogger(__name__)

PORTS: Final = "processes.json"
"""File of the ports, in the folder of the sessions."""


def serve_gateway(options: StandaloneOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. `announce` is called with the base URL. Raises OptionRefused, PolicyError."""
    uvloop.run(_serve(options, announce))


async def _serve(options: StandaloneOptions, announce: Callable[[str], None]) -> None:
    stopped, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if options.processes > 1:
        await _serve_several(options, announce, stopped)
        return

    async def until(_gateway: Gateway) -> None:
        await stopped.wait()

    await serve_one(options, announce, until)


async def _serve_several(options: StandaloneOptions, announce: Callable[[str], None], stopped: asyncio.Event) -> None:
    if options.processes > (most := most_processes()):
        raise OptionRefused(
            f"--processes {options.processes}: this machine has {most} cores for them; use at most {most}"
        )
    token = read_admin_token(options.admin_token_file)
    length = options.max_context_tokens or await context_length(options)
    ports = known_ports(options) or list(islice(stable_ports(), options.processes))
    members = [Member(each) for each in member_options(replace(options, max_context_tokens=length), ports)]
    async with AsyncExitStack() as stack:
        for member in members:
            stack.push_async_callback(member.stop)
        for member in members:
            await member.start()
        if options.state is not None:
            replace_file(
                options.state / PORTS, orjson.dumps({"ports": [urlsplit(member.url).port for member in members]})
            )
        http = await stack.enter_async_context(relay_session(aiohttp.TCPConnector(limit=0)))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        watching = [tasks.create_task(member.watch()) for member in members]
        for task in watching:
            stack.callback(task.cancel)
        app = Front(members, http, token).application()
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        settings = ConnectionSettings(
            header_timeout_s=DEFAULTS.header_timeout_s, send_timeout_s=DEFAULTS.send_timeout_s, refused=_log_refused
        )
        try:
            listener = await listen(runner, options.host, options.port, settings)
        except OSError as error:
            raise cannot_listen(options, error) from error
        stack.callback(listener.close)
        replacing = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, replacing.set)
        rolling = tasks.create_task(_replace_when_asked(members, replacing))
        stack.callback(rolling.cancel)
        announce(f"http://{options.host}:{listener.sockets[0].getsockname()[1]}")
        await stopped.wait()


async def _replace_when_asked(members: Sequence[Member], asked: asyncio.Event) -> None:
    """Replace the processes one after the other, each time it is asked for."""
    while True:
        await asked.wait()
        asked.clear()
        for member in members:
            await member.replace()
        logger.warning("%d gateway processes were replaced", len(members))


def _log_refused(path: str, reason: str, defect: BaseException | None) -> None:
    logger.warning("a request for %s was refused: %s", path, reason, exc_info=defect)


def member_options(options: StandaloneOptions, ports: Sequence[int]) -> list[StandaloneOptions]:
    """Return the options of each process: a port and a folder of sessions of its own."""
    return [
        replace(
            options,
            processes=1,
            place=place,
            port=port,
            state=None if options.state is None else options.state / f"process-{place}",
            advertise_url=None if options.advertise_url is None else with_port(options.advertise_url, port),
        )
        for place, port in enumerate(ports)
    ]


def with_port(url: str, port: int) -> str:
    """Return the URL at which other hosts reach a process: that of the gateway, with another port."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return parts._replace(netloc=f"{host}:{port}").geturl()


def known_ports(options: StandaloneOptions) -> list[int]:
    """Return the ports that the processes had before; none before the first start. Raises OptionRefused if there were
    more or fewer processes: their sessions would not be found."""
    path = None if options.state is None else options.state / PORTS
    if path is None or not path.exists():
        return []
    try:
        ports: list[int] = orjson.loads(path.read_bytes())["ports"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionRefused(f"--state {options.state}: {path.name} cannot be read: {error}") from error
    if len(ports) != options.processes:
        raise OptionRefused(
            f"--processes {options.processes}: the sessions in --state {options.state} belong to {len(ports)} "
            "processes; use as many, or another folder"
        )
    return ports
