"""Retrievers that a run starts for its corpora, which outlive the run's processes.

Invariants:
- A retriever is started once: a resumed run uses the one that answers at the recorded address for the same corpus.
- It leads a session of its own, and once it answers it does not die with its parent: a killed or interrupted run leaves
  it running. It ends with `stop_services`, and by itself when it has been idle.
- One that still indexes ends with the process that started it, since nobody would find it.
- While `running_services` is open, a retriever is not idle, and one that has died is started again at its address.
- A process is signalled only if its start time is the recorded one, since its id may have been used again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import aiohttp
import orjson
import psutil

from headrace.actors.errors import ConfigError
from headrace.actors.services.clients import refuse_silent_services
from headrace.actors.services.corpus import digest_of
from headrace.sandboxes.child_environment import child_environment

if TYPE_CHECKING:
    from headrace.actors.services.config import ServiceConfig

SERVICES_FOLDER: Final = "services"
IDLE_S: Final = 1800.0
"""Time without a request after which a retriever ends by itself."""
LOOK_S: Final = 60.0
"""Interval between two looks at each retriever."""
HEALTH_S: Final = 5.0
START_S: Final = 3600.0
"""Time limit for reading and indexing a corpus."""
STOP_S: Final = 3.0
POLL_S: Final = 0.05
SAME_START_S: Final = 2.0
"""Two start times this close are the same: they are computed from the system clock, which may have been adjusted."""
_PROGRAM: Final = "from headrace.actors.cli.app import main; main()"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedService:
    """Content of `services/NAME.json`, which the retriever writes once it answers."""

    url: str
    pid: int
    started_s: float
    """Unix time of the process's start."""
    corpus_sha256: str

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
                "corpus_sha256": str() as digest,
            }:
                return StartedService(url=url, pid=pid, started_s=started_s, corpus_sha256=digest)
    except (OSError, orjson.JSONDecodeError):
        pass
    return None


@asynccontextmanager
async def running_services(services: Mapping[str, ServiceConfig], folder: Path) -> AsyncIterator[dict[str, str]]:
    """Start the retrievers of all tables with a corpus, or find those that run, and yield their URLs by name. Keep them
    running until the block ends, and leave them running after it; see `stop_services`.

    Call this in the driver: Ray may kill the child processes of an actor that ends. `folder` is `SERVICES_FOLDER` in
    the run's state folder. Raises ConfigError if a service, also one with a URL of its own, does not answer; then those
    that this call has started are stopped. Errors of the block come out in an exception group."""
    corpora = {name: config.corpus for name, config in services.items() if config.corpus is not None}
    running: dict[str, StartedService] = {}
    begun = []
    try:
        for name, corpus in corpora.items():
            started = await _alive(folder / f"{name}.json", corpus)
            if started is None:
                begun.append(name)
                started = await start_retriever(name, corpus, folder)
            running[name] = started
        urls = {name: started.url for name, started in running.items()}
        await refuse_silent_services(resolved(services, urls))
    except BaseException:
        await asyncio.shield(stop_services(folder, begun))
        raise
    async with asyncio.TaskGroup() as keeping:
        keepers = [keeping.create_task(_keep(name, corpora[name], folder, running[name])) for name in corpora]
        try:
            yield urls
        finally:
            for keeper in keepers:
                keeper.cancel()


def resolved(services: Mapping[str, ServiceConfig], urls: Mapping[str, str]) -> dict[str, ServiceConfig]:
    """Return the tables with the URLs of the retrievers that the run has started, for `ServiceClients`."""
    return {
        name: config.model_copy(update={"url": urls[name], "corpus": None}) if name in urls else config
        for name, config in services.items()
    }


def spawn_retriever(corpus: Path, address: Path, log: Path, port: int) -> int:
    """Start a retriever as a process in a session of its own, and return its id. Call this in a thread that lives as
    long as the process."""
    address.parent.mkdir(parents=True, exist_ok=True)
    address.unlink(missing_ok=True)
    arguments = {
        "--corpus": corpus.resolve(),
        "--address-file": address.resolve(),
        "--port": port,
        "--idle-s": IDLE_S,
        "--parent-pid": os.getpid(),
    }
    # Neither asyncio's nor subprocess's: both hold on to a child, and asyncio kills it when its loop is closed.
    return os.posix_spawn(
        sys.executable,
        [
            sys.executable,
            "-c",
            _PROGRAM,
            "retriever",
            "serve",
            *(str(part) for pair in arguments.items() for part in pair),
        ],
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


async def start_retriever(name: str, corpus: Path, folder: Path, *, port: int = 0) -> StartedService:
    """Start a retriever, and wait until it answers. Raises ConfigError with the end of its log."""
    address, log = folder / f"{name}.json", folder / f"{name}.log"
    pid = spawn_retriever(corpus, address, log, port)
    process = psutil.Process(pid)
    try:
        async with asyncio.timeout(START_S):
            while (started := read_started(address)) is None or started.pid != pid:
                if not runs(process):
                    last = (log.read_text(errors="replace").strip() or "it wrote nothing").splitlines()[-1]
                    raise ConfigError(f"services.{name}.corpus: its retriever did not start: {last}")
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        await _end(process)
        raise ConfigError(
            f"services.{name}.corpus: its retriever was not ready within {START_S:g} s ({log}); start one yourself "
            f"(headrace retriever serve) and set services.{name}.url"
        ) from error
    except BaseException:
        await asyncio.shield(_end(process))
        raise
    logger.info("service %s: retriever %d answers at %s", name, pid, started.url)
    return started


def recorded_addresses(folder: Path) -> list[Path]:
    """Return the files with the addresses of the folder's retrievers."""
    return sorted(folder.glob("*.json"))


async def stop_services(folder: Path, names: list[str] | None = None) -> None:
    """Stop the retrievers that are recorded in the folder: all, or those with these names. Idempotent."""
    for address in recorded_addresses(folder):
        if names is not None and address.stem not in names:
            continue
        started = read_started(address)
        process = started.process() if started is not None else None
        if process is not None:
            await _end(process)
        address.unlink(missing_ok=True)


async def _alive(address: Path, corpus: Path) -> StartedService | None:
    """Return the recorded retriever if it answers for this corpus; otherwise end what is left of it."""
    started = read_started(address)
    process = started.process() if started is not None else None
    if started is None or process is None:
        return None
    digest = await asyncio.to_thread(digest_of, corpus)
    if started.corpus_sha256 == digest and await answers(started):
        return started
    await _end(process)
    return None


async def answers(started: StartedService) -> bool:
    """Return True if this very process answers at its address, for its corpus."""
    try:
        async with (
            asyncio.timeout(HEALTH_S),
            aiohttp.ClientSession() as session,
            session.get(f"{started.url}/health") as response,
        ):
            health = orjson.loads(await response.read())
    except (TimeoutError, aiohttp.ClientError, OSError, orjson.JSONDecodeError):
        return False
    same = {"status": "ok", "pid": started.pid, "corpus_sha256": started.corpus_sha256}
    return isinstance(health, dict) and same.items() <= health.items()


async def _keep(name: str, corpus: Path, folder: Path, started: StartedService) -> None:
    """Look at a retriever until cancelled, and start it again at the same port when its process has ended."""
    port = urlsplit(started.url).port or 0
    while True:
        await asyncio.sleep(LOOK_S)
        if started.process() is not None:
            # The request keeps it from being idle; one that is only busy answers later.
            await answers(started)
            continue
        logger.warning("service %s: its retriever has ended; starting it again", name)
        try:
            started = await start_retriever(name, corpus, folder, port=port)
        except (ConfigError, OSError, psutil.Error) as error:
            # The next look tries again; until then, calls to it are infra.
            logger.error("service %s: %s", name, error)


async def _end(process: psutil.Process) -> None:
    """End a process, by SIGKILL if SIGTERM does not."""
    for send in (process.terminate, process.kill):
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            send()
            await asyncio.to_thread(partial(process.wait, timeout=STOP_S))
            return
