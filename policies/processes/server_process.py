"""The life of a server that is a process of ours: started, asked until it answers, ended with all that it started.

Invariants:
- Inside the context the server answered at least once; on leaving it, the process is reaped and its group is gone.
- The process leads a session of its own, so that a signal for its group reaches what it started and nobody else.
- What it prints goes to a log file, and the end of that into EngineStartFailed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
from pydantic import BaseModel, ConfigDict, Field

from headrace.buffer.primitives.durable_files import replace_file
from headrace.policies.errors import EngineStartFailed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

LOG_TAIL_CHARACTERS = 2000
ASK_AGAIN_S = 0.05
GROUP_END_S = 5.0
"""Longest wait for what a killed server had started: the kernel may have much memory to free."""

logger = logging.getLogger(__name__)


def announce(path: Path, url: str) -> None:
    """Leave `{"url", "pid"}` for those who wait for this process to serve: whole or not at all."""
    replace_file(path, json.dumps({"url": url, "pid": os.getpid()}).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A program, its arguments and its whole environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class ServerConfig(BaseModel):
    """What every engine server of ours is told."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    """Model directory, with config.json."""
    directory: Path
    """Holds the log of this server and what else it writes; made if missing."""
    name: str = "engine"
    """Stem of those files' names."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=0, ge=0, lt=65536)
    """0 takes a free port."""
    weight_version: str = "1.0"
    """Label of the weights on disk."""
    seed: int = Field(default=0, ge=0)
    """Of the sampling: give each server another."""
    max_context: int | None = Field(default=None, gt=1)
    """Tokens of prompt and output together; None takes the server's default."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """From start to the first answer; most of it is imports."""
    stop_timeout_s: float = Field(default=3.0, gt=0)
    """From SIGTERM to SIGKILL."""


def option_list(options: Mapping[str, object]) -> tuple[str, ...]:
    """Of a command line; those that are None are left out."""
    return tuple(part for key, value in options.items() if value is not None for part in (key, str(value)))


class ServerProcess(ABC):
    """`async with ... as server: server.url`. A subclass says how it is started and when it answers."""

    def __init__(self, config: ServerConfig) -> None:
        self.name = config.name
        self.log_path = config.directory / f"{config.name}.log"
        self._start_timeout_s = config.start_timeout_s
        self._stop_timeout_s = config.stop_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""
        self._log_start_bytes = 0

    @property
    def url(self) -> str:
        return self._url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.shield(self.stop())

    async def start(self) -> None:
        """Start and wait until it answers. Raises EngineStartFailed; nothing is left behind then."""
        command = await self._prepare()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start_bytes = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *command.arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=command.environment,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self._url = await self._until_ready()
        except TimeoutError as error:
            await self.kill()
            raise EngineStartFailed(
                f"engine {self.name} was not ready within start_timeout_s={self._start_timeout_s}: {self.log_tail()}"
            ) from error
        except BaseException:
            await asyncio.shield(self.kill())
            raise

    async def wait(self) -> int:
        """The exit code, when the process ends."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL for its whole group, or what a dead one left of it, after `stop_timeout_s`.
        Idempotent."""
        if self._process is None:
            return
        if self.alive:
            with suppress(ProcessLookupError):
                self._process.terminate()
        try:
            async with asyncio.timeout(self._stop_timeout_s):
                await self._process.wait()
                await self._until_group_is_gone()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL for its whole group, also where it is dead itself, and reap. Idempotent."""
        if self._process is None:
            return
        if self._has_group():
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        try:
            async with asyncio.timeout(GROUP_END_S):
                await self._until_group_is_gone()
        except TimeoutError:
            logger.warning("engine %s: what it had started is still there after %s s", self.name, GROUP_END_S)

    @abstractmethod
    async def _prepare(self) -> ServerCommand:
        """What to run. Raises EngineStartFailed when it cannot be run."""

    @abstractmethod
    async def _ready_url(self) -> str | None:
        """The URL once the server answers; asked again and again."""

    def log_tail(self) -> str:
        """The end of what this start printed."""
        with self.log_path.open("rb") as log:
            # A log that was emptied since holds what was printed last from its beginning.
            log.seek(self._log_start_bytes if self._log_start_bytes <= os.fstat(log.fileno()).st_size else 0)
            text = log.read().decode(errors="replace")
        return text[-LOG_TAIL_CHARACTERS:].strip() or f"{self.log_path} is empty"

    async def _until_ready(self) -> str:
        assert self._process is not None
        while True:
            url = await self._ready_url()
            if url is not None:
                return url
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_AGAIN_S):
                    code = await self._process.wait()
                    raise EngineStartFailed(f"engine {self.name} ended with {code}: {self.log_tail()}")

    async def _until_group_is_gone(self) -> None:
        """They are not our children, so that there is nothing to wait on."""
        while True:
            if not self._has_group():
                return
            await asyncio.sleep(ASK_AGAIN_S)

    def _has_group(self) -> bool:
        """Nobody gets the number of a reaped leader before its group is gone: who has it is somebody else."""
        if not self.alive and Path(f"/proc/{self.pid}").exists():
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return any(_runs_in(self.pid, process_id) for process_id in psutil.pids())


def _runs_in(group: int, process_id: int) -> bool:
    """A zombie runs no more: where the first process of a container reaps nobody, it stays for ever."""
    try:
        return os.getpgid(process_id) == group and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
