"""A process of the embedded CPU engine.

Invariants:
- It dies with this process, also under kill -9 of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from headrace.policies.server_process import ServerCommand, ServerProcess


class EngineProcessConfig(BaseModel):
    """How to start one CPU engine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    """Model directory."""
    directory: Path
    """Holds the announcement and the log of this engine; made if missing."""
    host: str = "127.0.0.1"
    """Address to bind."""
    port: int = Field(default=0, ge=0, lt=65536)
    """0 takes a free port."""
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


class EngineProcess(ServerProcess):
    """`async with EngineProcess(config) as engine: engine.url`. Raises EngineStartFailed with the end of the log."""

    def __init__(self, config: EngineProcessConfig) -> None:
        super().__init__(
            name=config.name,
            log_path=config.directory / f"{config.name}.log",
            start_timeout_s=config.start_timeout_s,
            stop_timeout_s=config.stop_timeout_s,
        )
        self._config = config
        self._announcement = config.directory / f"{config.name}.announce.json"

    async def _prepare(self) -> ServerCommand:
        self._announcement.unlink(missing_ok=True)
        return ServerCommand(arguments=self._arguments(), environment=engine_environment())

    async def _ready_url(self) -> str | None:
        # The announcement is a file because the engine may also be attached to by others; no descriptor is shared.
        if not self._announcement.exists():
            return None
        url: str = json.loads(self._announcement.read_text())["url"]
        return url

    def _arguments(self) -> tuple[str, ...]:
        config = self._config
        command = [sys.executable, "-m", "headrace.policies.cpu_engine"]
        options = {
            "--model": config.model,
            "--announce": self._announcement,
            "--host": config.host,
            "--port": config.port,
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
        return tuple(command)


def engine_environment() -> dict[str, str]:
    """One thread for every numeric library: two engines on two cores must not fight."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
