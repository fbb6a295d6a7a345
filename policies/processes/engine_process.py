"""A process of the embedded CPU engine.

Invariants:
- It dies with this process, also under kill -9 of it.
"""

from __future__ import annotations

import json
import os
import sys

from pydantic import Field

from headrace.policies.processes.server_process import ServerCommand, ServerConfig, ServerProcess, option_list


class EngineProcessConfig(ServerConfig):
    """How to start one CPU engine."""

    max_running: int = Field(default=64, gt=0)
    """Sequences decoded at once."""
    group_timeout_s: float = Field(default=21.0, gt=0)
    """Longest formation of a weight group, and longest transfer of one bucket: a second more than at the sender
    (`push.transfer_timeout_s`), which is to give up first."""


class EngineProcess(ServerProcess):
    """`async with EngineProcess(config) as engine: engine.url`. Raises EngineStartFailed with the end of the log."""

    def __init__(self, config: EngineProcessConfig) -> None:
        super().__init__(config)
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
        return (sys.executable, "-m", "headrace.policies.cpu_engine", *option_list(options))


def engine_environment() -> dict[str, str]:
    """One thread for every numeric library: two engines on two cores must not fight."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
