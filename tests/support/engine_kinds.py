"""The engines that the contract is checked against: our embedded one, and SGLang itself where it is installed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig, ServerProcess
from headrace.policies.sglang.installation import environment_python
from headrace.policies.sglang.server import SGLangProcess, SGLangServerConfig
from headrace.policies.sglang.versions import DEFAULT_VERSION, DIALECTS, SGLangApi, dialect_of

SGLANG_VERSION = os.environ.get("HEADRACE_SGLANG_VERSION", DEFAULT_VERSION)
CONTEXT = 1024


def kind_dialect(kind: str) -> SGLangApi:
    return DIALECTS[-1] if kind == "cpu" else dialect_of(SGLANG_VERSION)


def engine_process(
    kind: str,
    model: Path,
    directory: Path,
    *,
    max_running: int = 64,
    dtype: str = "float32",
    key_file: Path | None = None,
    report_times: bool = True,
    arguments: tuple[str, ...] = (),
    traces_url: str = "",
) -> ServerProcess:
    """Not started yet. Skips the test where SGLang is not installed, which gets the `arguments`."""
    if kind == "cpu":
        # Tests write the weights that they load beside the engine's folder.
        weights = (directory.parent,)
        config = EngineProcessConfig(
            model=model,
            directory=directory,
            weights=weights,
            max_running=max_running,
            group_timeout_s=8.0,
            key_file=key_file,
        )
        return EngineProcess(config)
    python = environment_python(SGLANG_VERSION)
    if python is None:
        pytest.skip(f"SGLang {SGLANG_VERSION} is not installed: scripts/install sglang, or scripts/test --sglang")
    given = {"model": model, "directory": directory, "python": python, "max_running": max_running, "dtype": dtype}
    more = {"key_file": key_file, "report_times": report_times, "arguments": arguments, "traces_url": traces_url}
    return SGLangProcess(SGLangServerConfig.model_validate(given | more | {"max_context": CONTEXT}))


def changed_sglang(folder: Path, **environment: str) -> Path:
    """Write an interpreter whose SGLang is changed as `support.server_site` says, and return it. Skips the test where
    SGLang is not installed."""
    python = environment_python(SGLANG_VERSION)
    if python is None:
        pytest.skip(f"SGLang {SGLANG_VERSION} is not installed: scripts/install sglang, or scripts/test --sglang")
    tests = Path(__file__).resolve().parents[1]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    path = f"export PYTHONPATH={tests / 'support' / 'server_site'}:{tests}:$PYTHONPATH"
    script = folder / "python"
    script.write_text("\n".join(("#!/bin/sh", path, *exports, f'exec {python} "$@"')) + "\n", encoding="utf-8")
    script.chmod(0o755)
    return script
