"""An engine process of ours and its life.

Invariants:
- Inside the context the process answered at least once; on leaving it, the process is gone and reaped.
- It dies with this process, also under kill -9 of it; what it prints goes to a log file.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, Field

from headrace.policies.errors import EngineStartFailed

if TYPE_CHECKING:
    from types import TracebackType

LOG_TAIL_CHARACTERS = 2000


class EngineProcessConfig(BaseModel):
    """How to start one CPU engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    """Model directory."""
    directory: Path
    """Holds the announcement and the log of this engine; made if missing."""
    name: str = "engine"
    """Stem of both files."""
    weight_version: str = "1.0"
    """Label of the weights on disk."""
    seed: int = Field(default=0, ge=0)
    """Of the sampling noise: give each engine another."""
    max_running: int = Field(default=64, gt=0)
    """Sequences decoded at once."""
    max_context: int | None = Field(default=None, gt=1)
    """Tokens; None takes the engine's default."""
    group_timeout_s: float = Field(default=20.0, gt=0)
    """Longest formation of a weight group, and longest transfer of one bucket."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """From start to announcement; importing torch takes seconds."""
    stop_timeout_s: float = Field(default=3.0, gt=0)
    """From SIGTERM to SIGKILL."""


class EngineProcess:
    """`async with EngineProcess(config) as engine: engine.url`. Raises EngineStartFailed with the end of the log."""

    def __init__(self, config: EngineProcessConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._url = ""
        self._announcement = config.directory / f"{config.name}.announce.json"
        self.log_path = config.directory / f"{config.name}.log"

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
        """Start and wait for the announcement. Raises EngineStartFailed; nothing is left behind then."""
        config = self._config
        config.directory.mkdir(parents=True, exist_ok=True)
        self._announcement.unlink(missing_ok=True)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=engine_environment()
            )
        try:
            async with asyncio.timeout(config.start_timeout_s):
                self._url = await self._announced()
        except TimeoutError as error:
            await self.kill()
            raise EngineStartFailed(
                f"engine {config.name} announced nothing within start_timeout_s={config.start_timeout_s}: "
                f"{self._log_tail()}"
            ) from error
        except BaseException:
            await self.kill()
            raise

    async def wait(self) -> int:
        """The exit code, when the process ends."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after `stop_timeout_s`. Idempotent."""
        if self._process is None or self._process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(self._config.stop_timeout_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    async def kill(self) -> None:
        """SIGKILL and reap. Idempotent."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def _command(self) -> list[str]:
        config = self._config
        command = [sys.executable, "-m", "headrace.policies.cpu_engine"]
        options = {
            "--model": config.model,
            "--announce": self._announcement,
            "--weight-version": config.weight_version,
            "--seed": config.seed,
            "--max-running": config.max_running,
            "--max-context": config.max_context,
            "--group-timeout-s": config.group_timeout_s,
            "--parent-pid": os.getpid(),
        }
        for key, value in options.items():
            if value is not None:
                command += [key, str(value)]
        return command

    async def _announced(self) -> str:
        assert self._process is not None
        while True:
            # The announcement is a file because the engine may also be attached to by others; no descriptor is shared.
            if self._announcement.exists():
                url: str = json.loads(self._announcement.read_text())["url"]
                return url
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    code = await self._process.wait()
                    raise EngineStartFailed(f"engine {self._config.name} ended with {code}: {self._log_tail()}")

    def _log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-LOG_TAIL_CHARACTERS:].strip() or f"{self.log_path} is empty"


def engine_environment() -> dict[str, str]:
    """One thread for every numeric library: two engines on two cores must not fight."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
