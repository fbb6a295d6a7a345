"""Services that a run starts, retrievers and helper models, which outlive the run's processes.

Invariants:
- A service is started once: a resumed run uses the one that answers at the recorded address for the same content.
- It leads a session of its own, and once it answers it does not die with its parent: a killed or interrupted run leaves
  it running. It ends with `stop_services`, and by itself when it has been idle.
- One that is not ready yet ends with the process that started it, since nobody would find it.
- While `running_services` is open, a service is not idle, and one that has died is started again at its address.
- A process is signalled only if its start time is the recorded one, since its id may have been used again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import orjson
import psutil

from headrace.actors.errors import ConfigError
from headrace.actors.services.clients import refuse_silent_services
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.corpus import digest_of
from headrace.policies.processes.server_process import option_list
from headrace.sandboxes.host.child_environment import child_environment

SERVICES_FOLDER: Final = "services"
IDLE_S: Final = 1800.0
"""Time without a request after which a service ends by itself."""
LOOK_S: Final = 60.0
"""Interval between two looks at each service."""
HEALTH_S: Final = 5.0
START_S: Final = 3600.0
"""Time limit for indexing a corpus, or for loading a model."""
STOP_S: Final = 3.0
POLL_S: Final = 0.05
SAME_START_S: Final = 2.0
"""Two start times this close are the same: they are computed from the system clock, which may have been adjusted."""
_PROGRAM: Final = "from headrace.actors.cli.app import main; main()"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedService:
    """Content of `services/NAME.json`, which the service writes once it answers."""

    url: str
    pid: int
    started_s: float
    """Unix time of the process's start."""
    sha256: str
    """Digest of what it serves."""

    def process(self) -> psutil.Process | None:
        """Return the process if it still runs."""
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started_s) < SAME_START_S
        except psutil.NoSuchProcess:
            return None
        return process if is_same and runs(process) else None


def runs(process: psutil.Process) -> bool:
    """Return True unless a process has ended. One that has is reaped if it is a child of this process."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return True
        process.wait(timeout=0)
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        pass
    return False


def read_started(path: Path) -> StartedService | None:
    """Return the content of `services/NAME.json`; None if there is none or it is damaged."""
    try:
        match orjson.loads(path.read_bytes()):
            case {
                "url": str() as url,
                "pid": int() as pid,
                "started_s": float() as started_s,
                "sha256": str() as digest,
            }:
                return StartedService(url=url, pid=pid, started_s=started_s, sha256=digest)
    except (OSError, orjson.JSONDecodeError):
        pass
    return None


def model_digest(folder: Path) -> str:
    """Return a digest of a model directory: its config.json, and the name, size and time of every file. Raises
    OSError."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.iterdir()):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


@asynccontextmanager
async def running_services(services: Mapping[str, ServiceConfig], folder: Path) -> AsyncIterator[dict[str, str]]:
    """Start the services of all tables with a corpus or a model directory, or find those that run, and yield their URLs
    by name. Keep them running until the block ends, and leave them running after it; see `stop_services`.

    Call this in the driver: Ray may kill the child processes of an actor that ends. `folder` is `SERVICES_FOLDER` in
    the run's state folder. Raises ConfigError if a service, also one with a URL of its own, does not answer; then those
    that this call has started are stopped. Errors of the block come out in an exception group."""
    programs = {name: Program.of(name, config) for name, config in services.items() if config.is_started}
    running: dict[str, StartedService] = {}
    begun = []
    try:
        for name, program in programs.items():
            started = await _alive(folder / f"{name}.json", program)
            if started is None:
                begun.append(name)
                started = await start_service(program, folder)
            running[name] = started
        urls = {name: started.url for name, started in running.items()}
        await refuse_silent_services(resolved(services, urls))
    except BaseException:
        await asyncio.shield(stop_services(folder, begun))
        raise
    async with asyncio.TaskGroup() as keeping:
        keepers = [keeping.create_task(_keep(program, folder, running[name])) for name, program in programs.items()]
        try:
            yield urls
        finally:
            for keeper in keepers:
                keeper.cancel()


def resolved(services: Mapping[str, ServiceConfig], urls: Mapping[str, str]) -> dict[str, ServiceConfig]:
    """Return the tables with the URLs of the services that the run has started, for `ServiceClients`."""
    return {
        name: config.model_copy(update={"url": urls[name], "corpus": None, "path": None}) if name in urls else config
        for name, config in services.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Program of a service. `command` and `options` are those of `headrace`, and `digest` identifies the `content`."""

    name: str
    """Name of the service."""
    noun: str
    """The program in words."""
    key: str
    """Key of the table that names the content."""
    command: tuple[str, ...]
    content: Path
    digest: Callable[[Path], str]
    options: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, config: ServiceConfig) -> Program:
        """Return the program of a table that the run starts."""
        if config.corpus is not None:
            return cls(
                name=name,
                noun="retriever",
                key="corpus",
                command=("serve", "retriever", "--corpus"),
                content=config.corpus.resolve(),
                digest=digest_of,
            )
        assert config.path is not None
        engine = config.engine
        return cls(
            name=name,
            noun="model server",
            key="path",
            command=("serve", "model", "--model"),
            content=config.path.resolve(),
            digest=model_digest,
            options={
                "--backend": engine.backend,
                "--dtype": engine.dtype if engine.backend == "sglang" else None,
                "--python": engine.python,
                "--max-context": engine.max_context,
            },
        )

    def spawn(self, folder: Path, port: int) -> int:
        """Start the program as a process in a session of its own, and return its id. Call this in a thread that lives
        as long as the process."""
        folder.mkdir(parents=True, exist_ok=True)
        address, log = folder / f"{self.name}.json", folder / f"{self.name}.log"
        address.unlink(missing_ok=True)
        options = {
            **self.options,
            "--json": address.resolve(),
            "--port": port,
            "--idle-s": IDLE_S,
            "--parent-pid": os.getpid(),
        }
        # Neither asyncio's nor subprocess's: both hold on to a child, and asyncio kills it when its loop is closed.
        return os.posix_spawn(
            sys.executable,
            [sys.executable, "-c", _PROGRAM, *self.command, str(self.content), *option_list(options)],
            child_environment(OMP_NUM_THREADS="1"),
            setsid=True,
            # A background job of a shell, which may have started the run, ignores SIGINT, and its children would, too.
            setsigdef=(signal.SIGINT, signal.SIGTERM),
            setsigmask=(),
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
        )


async def start_service(program: Program, folder: Path, *, port: int = 0) -> StartedService:
    """Start a service, and wait until it answers. Raises ConfigError with the end of its log."""
    address, log, key = folder / f"{program.name}.json", folder / f"{program.name}.log", f"services.{program.name}"
    pid = program.spawn(folder, port)
    process = psutil.Process(pid)
    try:
        async with asyncio.timeout(START_S):
            while (started := read_started(address)) is None or started.pid != pid:
                if not runs(process):
                    last = (log.read_text(errors="replace").strip() or "it wrote nothing").splitlines()[-1]
                    raise ConfigError(f"{key}.{program.key}: its {program.noun} did not start: {last}")
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        await _end(process)
        raise ConfigError(
            f"{key}.{program.key}: its {program.noun} was not ready within {START_S:g} s ({log}); start one yourself "
            f"(headrace {' '.join(program.command[:2])}) and set {key}.url"
        ) from error
    except BaseException:
        await asyncio.shield(_end(process))
        raise
    logger.info("service %s: %s %d answers at %s", program.name, program.noun, pid, started.url)
    return started


def recorded_addresses(folder: Path) -> list[Path]:
    """Return the files with the addresses of the folder's services."""
    return sorted(folder.glob("*.json"))


async def stop_services(folder: Path, names: list[str] | None = None) -> None:
    """Stop the services that are recorded in the folder: all, or those with these names. Idempotent."""
    for address in recorded_addresses(folder):
        if names is not None and address.stem not in names:
            continue
        started = read_started(address)
        process = started.process() if started is not None else None
        if process is not None:
            await _end(process)
        address.unlink(missing_ok=True)


async def _alive(address: Path, program: Program) -> StartedService | None:
    """Return the recorded service if it answers for this content; otherwise end what is left of it."""
    started = read_started(address)
    process = started.process() if started is not None else None
    if started is None or process is None:
        return None
    digest = await asyncio.to_thread(program.digest, program.content)
    if started.sha256 == digest and await answers(started):
        return started
    await _end(process)
    return None


async def answers(started: StartedService) -> bool:
    """Return True if this very process answers at its address, for the same content."""
    try:
        async with (
            asyncio.timeout(HEALTH_S),
            aiohttp.ClientSession() as session,
            session.get(f"{started.url}/health") as response,
        ):
            health = orjson.loads(await response.read())
    except (TimeoutError, aiohttp.ClientError, OSError, orjson.JSONDecodeError):
        return False
    same = {"status": "ok", "pid": started.pid, "sha256": started.sha256}
    return isinstance(health, dict) and same.items() <= health.items()


async def _keep(program: Program, folder: Path, started: StartedService) -> None:
    """Look at a service until cancelled, and start it again at the same port when its process has ended."""
    port = urlsplit(started.url).port or 0
    while True:
        await asyncio.sleep(LOOK_S)
        if started.process() is not None:
            # The request keeps it from being idle; one that is only busy answers later.
            await answers(started)
            continue
        logger.warning("service %s: its %s has ended; starting it again", program.name, program.noun)
        try:
            started = await start_service(program, folder, port=port)
        except (ConfigError, OSError, psutil.Error) as error:
            # The next look tries again; until then, calls to it are infra.
            logger.error("service %s: %s", program.name, error)


async def _end(process: psutil.Process) -> None:
    """End a process, by SIGKILL if SIGTERM does not."""
    for send in (process.terminate, process.kill):
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            send()
            await asyncio.to_thread(partial(process.wait, timeout=STOP_S))
            return
