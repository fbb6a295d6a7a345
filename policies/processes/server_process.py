"""Base class of server processes, which are started, polled until they answer, and stopped with their child processes.

Invariants:
- Inside the context the server has answered at least once; after the context, the process has been reaped and its group
  is gone.
- The process leads its own session, so that a signal to its group reaches only the process and its children.
- Its output is written to a log file, whose end is included in EngineStartFailed.
- It dies with this process, even if this process is killed with kill -9.
- It gets no secret from the environment, and its key, if it has one, only as the path of a private file. The log is
  private too: SGLang writes all its options to it.
- It listens on other addresses than loopback only with a key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from pydantic import Field

from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.primitives.sections import Section
from headrace.policies.errors import EngineStartFailed
from headrace.policies.processes.engine_keys import read_engine_key, require_key
from headrace.sandboxes.host.child_environment import child_environment

LOG_TAIL_CHARACTERS = 2000
ASK_AGAIN_S = 0.05
GROUP_END_S = 5.0
"""Time limit for a killed server's children to exit: the kernel may have a lot of memory to free."""

logger = logging.getLogger(__name__)


def announce(path: Path, url: str) -> None:
    """Write `{"url", "pid"}` atomically, for processes that wait until this one is serving."""
    replace_file(path, json.dumps({"url": url, "pid": os.getpid()}).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """A program's arguments and its complete environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


class ServerConfig(Section):
    """Settings that all engine servers have."""

    model: Path
    """Model directory, with config.json."""
    directory: Path
    """Directory for the log and other files of this server; created if missing."""
    name: str = "engine"
    """Stem of the names of this server's files."""
    host: str = "127.0.0.1"
    """Address to bind; any address other than loopback needs `key_file`."""
    port: int = Field(default=0, ge=0, lt=65536)
    """Port to bind; 0 chooses a free one."""
    key_file: Path | None = None
    """Private file with the key that every request must carry; None accepts requests without one."""
    weight_version: str = "1.0"
    """Label of the weights on disk."""
    seed: int = Field(default=0, ge=0)
    """Random seed for sampling; it should differ for each server."""
    max_context: int | None = Field(default=None, gt=1)
    """Maximum number of tokens in prompt and output together; None uses the server's default."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit from start to the first answer; imports take most of it."""
    stop_timeout_s: float = Field(default=3.0, gt=0)
    """Time from SIGTERM to SIGKILL."""


def option_list(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return command-line options; those with the value None are omitted."""
    return tuple(part for key, value in options.items() if value is not None for part in (key, str(value)))


class ServerProcess(ABC):
    """Server process: `async with ... as server: server.url`. A subclass defines its command and when it is ready."""

    def __init__(self, config: ServerConfig) -> None:
        self.name = config.name
        self.log_path = config.directory / f"{config.name}.log"
        self._host = config.host
        self._key_file = config.key_file
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

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop())

    async def start(self) -> None:
        """Start the process and wait until it answers. Raises EngineStartFailed, without leaving a process behind."""
        require_key(self._host, self._key_file)
        read_engine_key(self._key_file, f"engine {self.name}: key file")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = await self._prepare()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with os.fdopen(os.open(self.log_path, flags, 0o600), "ab") as log:
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
                while (url := await self._ready_url()) is None:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(ASK_AGAIN_S):
                            code = await self._process.wait()
                            raise EngineStartFailed(f"engine {self.name} exited with {code}: {self.log_tail()}")
                self._url = url
        except TimeoutError as error:
            await self.kill()
            raise EngineStartFailed(
                f"engine {self.name} was not ready within start_timeout_s={self._start_timeout_s}: {self.log_tail()}"
            ) from error
        except BaseException:
            await asyncio.shield(self.kill())
            raise

    async def wait(self) -> int:
        """Wait for the process to exit, and return its exit code."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Terminate the process, and after `stop_timeout_s` kill whatever is left of its group. Idempotent."""
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
        """Kill the process group, even if the process itself is dead, and reap the process. Idempotent."""
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
            logger.warning("engine %s: its child processes are still running after %s s", self.name, GROUP_END_S)

    @abstractmethod
    async def _prepare(self) -> ServerCommand:
        """Return the command to run. Raises EngineStartFailed when it cannot be run."""

    @abstractmethod
    async def _ready_url(self) -> str | None:
        """Return the URL if the server answers, else None; called repeatedly."""

    def log_tail(self) -> str:
        """Return the end of the output since the last start."""
        with self.log_path.open("rb") as log:
            # If the log was truncated meanwhile, all of it is from this start.
            log.seek(self._log_start_bytes if self._log_start_bytes <= os.fstat(log.fileno()).st_size else 0)
            text = log.read().decode(errors="replace")
        return text[-LOG_TAIL_CHARACTERS:].strip() or f"{self.log_path} is empty"

    async def _until_group_is_gone(self) -> None:
        # Polled, because the members of the group are not our children and cannot be waited for.
        while True:
            if not self._has_group():
                return
            await asyncio.sleep(ASK_AGAIN_S)

    def _has_group(self) -> bool:
        # An id is not reused while a group has it: if another process has the reaped leader's id, the group is gone.
        if not self.alive and Path(f"/proc/{self.pid}").exists():
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        for process_id in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                # Zombies do not count: if the init process of a container does not reap, they stay for ever.
                is_member = os.getpgid(process_id) == self.pid
                if is_member and psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE:
                    return True
        return False


class EngineProcessConfig(ServerConfig):
    """Settings of one CPU engine process."""

    weights: tuple[Path, ...] = ()
    """Folders from which the engine may be told to load weights, besides `model`."""
    max_running: int = Field(default=64, gt=0)
    """Maximum number of sequences decoded concurrently."""
    group_timeout_s: float = Field(default=21.0, gt=0)
    """Time limit for forming a weight group, and for transferring one bucket. It is a second longer than the sender's
    limit (`PushConfig.transfer_timeout_s`), which should expire first."""


class EngineProcess(ServerProcess):
    """CPU engine process: `async with EngineProcess(config) as engine: engine.url`. Raises EngineStartFailed with the
    end of the log."""

    def __init__(self, config: EngineProcessConfig) -> None:
        super().__init__(config)
        self._config = config
        self._announcement = config.directory / f"{config.name}.announce.json"

    async def _prepare(self) -> ServerCommand:
        self._announcement.unlink(missing_ok=True)
        return ServerCommand(arguments=self._arguments(), environment=engine_environment())

    async def _ready_url(self) -> str | None:
        # The engine announces its address in a file and not in a descriptor, because other processes may read it too.
        if not self._announcement.exists():
            return None
        url: str = json.loads(self._announcement.read_text())["url"]
        return url

    def _arguments(self) -> tuple[str, ...]:
        config = self._config
        options = {
            "--model": config.model,
            "--announce": self._announcement,
            "--host": config.host,
            "--port": config.port,
            "--key-file": config.key_file,
            "--weight-version": config.weight_version,
            "--seed": config.seed,
            "--max-running": config.max_running,
            "--max-context": config.max_context,
            "--group-timeout-s": config.group_timeout_s,
            "--parent-pid": os.getpid(),
        }
        weights = (part for folder in config.weights for part in ("--weights", str(folder)))
        return (sys.executable, "-m", "headrace.policies.cpu_engine", *option_list(options), *weights)


def engine_environment() -> dict[str, str]:
    """Return the environment with one thread for numeric libraries, so that engines do not compete for cores."""
    return child_environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
