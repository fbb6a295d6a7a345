# ruff: noqa: T201 - a program
"""Installs SGLang for CPUs into a separate environment: `scripts/install sglang [VERSION]`.

Invariants:
- An environment without a stamp of its pins is incomplete. It is rebuilt unless a process is running from it. Only one
  installer at a time works on a version.
- The environment contains nothing from headrace: the shims that a CPU server needs are added to its path at startup.
- Standard output is one line, the path of the environment's interpreter.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

import psutil

from headrace.buffer.primitives.file_lock import FileLock
from headrace.policies.sglang.versions import DEFAULT_VERSION

TORCH: Final = "torch==2.13.0"
"""The version that headrace uses."""
TORCHVISION: Final = "torchvision==0.28.0"
"""Release of torchvision for that torch version."""
_OWN: Final = {
    "0.5.15.post1": (
        "transformers==5.12.1",
        "tokenizers==0.22.2",
        "xgrammar==0.2.1",
        "llguidance>=0.7.11,<0.8",
    ),
    "0.5.21": ("transformers==5.12.1", "tokenizers==0.22.2", "xgrammar==0.2.7", "llguidance>=1.7.6,<2"),
    "0.5.23": ("transformers==5.19.0", "tokenizers==0.23.2", "xgrammar==0.2.7", "llguidance==1.9.1"),
}
"""Requirements of one version only, beside those of all (requirements.txt), torch, torchvision and SGLang itself."""
_FOR_ALL: Final = Path(__file__).with_name("requirements.txt")
SHIMS: Final = Path(__file__).with_name("shims")
"""Replacements for two native libraries that have no CPU builds; they compute nothing."""
_STAMP: Final = "headrace-stamp"
_TIMEOUT_S: Final = 1800.0


class EnvironmentFailed(Exception):
    """The environment could not be created; the message ends with the output of pip or python."""


def environment_directory(version: str) -> Path:
    """Return the directory of a version's environment, which may not exist."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headrace" / f"sglang-{version}"


def environment_python(version: str = DEFAULT_VERSION) -> Path | None:
    """Return the interpreter of a complete environment, or None if it is not installed."""
    directory = environment_directory(version)
    return directory / "bin" / "python" if _is_complete(directory, version) else None


def install(version: str) -> Path:
    """Create the environment if it is missing, and return its interpreter. Raises EnvironmentFailed."""
    directory = environment_directory(version)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(f".{directory.name}.lock")):
        if not _is_complete(directory, version):
            # By the name they were started with, because an environment's python is a link.
            started = ((process.pid, process.info["cmdline"]) for process in psutil.process_iter(["cmdline"]))
            if pids := [pid for pid, command in started if command and command[0].startswith(f"{directory}/")]:
                raise EnvironmentFailed(
                    f"{directory} has other pins, and processes {pids} are running from it: end them first"
                )
            shutil.rmtree(directory, ignore_errors=True)
            print(f"installing SGLang {version} into {directory} (3 GB, about four minutes) ...", file=sys.stderr)
            _run((os.environ.get("PYTHON", sys.executable), "-m", "venv", str(directory)))
            python = str(directory / "bin" / "python")
            pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
            _run((*pip, TORCH))
            _run((*pip, TORCH, *_requirements(version)))
            # Their metadata requires CUDA's libraries.
            _run((*pip, "--no-deps", f"sglang=={version}", TORCHVISION))
            _run((python, "-c", "import torchvision, sglang.srt.server_args"), {"PYTHONPATH": str(SHIMS)})
            (directory / _STAMP).write_text(_pins(version))
    return directory / "bin" / "python"


def _is_complete(directory: Path, version: str) -> bool:
    stamp = directory / _STAMP
    return stamp.is_file() and stamp.read_text() == _pins(version)


def _requirements(version: str) -> tuple[str, ...]:
    lines = _FOR_ALL.read_text(encoding="utf-8").splitlines()
    return (*(line for line in lines if not line.startswith("#")), *_OWN[version])


def _pins(version: str) -> str:
    pins = "\n".join((TORCH, TORCHVISION, version, *_requirements(version)))
    return sha256(pins.encode()).hexdigest()


def _run(command: Sequence[str], more: dict[str, str] | None = None) -> None:
    """Run a command. Raises EnvironmentFailed with the end of its output."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | (more or {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFailed(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        output = (done.stdout + done.stderr).strip()[-600:]
        raise EnvironmentFailed(f"{' '.join(command[:4])} ... ended with {done.returncode}: {output}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program. Returns 0 if the environment exists, else 1, with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="scripts/install sglang", description="Installs SGLang for CPUs.")
    parser.add_argument("version", nargs="?", default=DEFAULT_VERSION, help=f"one of {', '.join(_OWN)}")
    version = parser.parse_args(arguments).version
    if version not in _OWN:
        parser.error(f"SGLang {version} is not supported; choose one of {', '.join(_OWN)}")
    try:
        print(install(version))
    except EnvironmentFailed as error:
        print(f"SGLang {version} is not installed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
