"""Process of the embedded CPU engine.

Invariant: it dies with this process, even if this is killed with kill -9.
"""

from __future__ import annotations

import json
import os
import sys

from pydantic import Field

from headrace.policies.processes.server_process import ServerCommand, ServerConfig, ServerProcess, option_list


class EngineProcessConfig(ServerConfig):
    """Settings of one CPU engine process."""

    max_running: int = Field(default=64, gt=0)
    """Maximum number of sequences decoded concurrently."""
    group_timeout_s: float = Field(default=21.0, gt=0)
    """Time limit for the formation of a weight group, and for the transfer of one bucket. A second more than that of
    the sender (`push.transfer_timeout_s`), which should pass first."""


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
            "--weight-version": config.weight_version,
            "--seed": config.seed,
            "--max-running": config.max_running,
            "--max-context": config.max_context,
            "--group-timeout-s": config.group_timeout_s,
            "--parent-pid": os.getpid(),
        }
        return (sys.executable, "-m", "headrace.policies.cpu_engine", *option_list(options))


def engine_environment() -> dict[str, str]:
    """Return the environment with one thread for numeric libraries, so that engines do not compete for cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
