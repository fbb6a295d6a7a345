"""The process of one engine: the embedded one, or a server of SGLang."""

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
    """One engine that is to be started: it binds to `host`, and its files in `directory` have the stem `name`.
    `group_timeout_s` bounds the formation of a weight group, and the transfer of a bucket, at the engine's end."""

    name: str
    model_dir: Path
    directory: Path
    seed: int
    group_timeout_s: float
    host: str = "127.0.0.1"


def server_process(config: EnginesConfig, plan: ServerPlan) -> ServerProcess:
    """The process of one engine, not yet started."""
    return _sglang(config, plan) if config.backend == "sglang" else _embedded(config, plan)


def _embedded(config: EnginesConfig, plan: ServerPlan) -> ServerProcess:
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


def _sglang(config: EnginesConfig, plan: ServerPlan) -> ServerProcess:
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
