"""Parameters of one engine process, which is the embedded engine or an SGLang server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.policies.processes.engine_process import EngineProcess, EngineProcessConfig
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.actors.engine_group.config import EnginesConfig
    from headrace.policies.processes.server_process import ServerProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """Parameters of an engine to start. It binds to `host`, and its files in `directory` have the stem `name`.
    `group_timeout_s` bounds the formation of a weight group, and the transfer of a bucket, on the engine's side."""

    name: str
    model_dir: Path
    directory: Path
    seed: int
    group_timeout_s: float
    host: str = "127.0.0.1"


def server_process(config: EnginesConfig, plan: ServerPlan) -> ServerProcess:
    """Return the process of one engine, not yet started."""
    if config.backend == "sglang":
        return SGLangProcess(
            SGLangServerConfig(
                model=plan.model_dir,
                directory=plan.directory,
                python=config.sglang.python,
                device=config.device,
                name=plan.name,
                host=plan.host,
                seed=plan.seed,
                max_running=config.max_running,
                max_context=config.max_context_tokens,
                tensor_parallel=config.tensor_parallel,
                dtype=config.dtype,
                arguments=config.sglang.arguments,
                start_timeout_s=config.start_timeout_s,
            )
        )
    return EngineProcess(
        EngineProcessConfig(
            model=plan.model_dir,
            directory=plan.directory,
            host=plan.host,
            name=plan.name,
            seed=plan.seed,
            max_running=config.max_running,
            max_context=config.max_context_tokens,
            group_timeout_s=plan.group_timeout_s,
            start_timeout_s=config.start_timeout_s,
        )
    )
