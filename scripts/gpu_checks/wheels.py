"""Packages that the suite needs beside a torch for CUDA, as wheels to carry to a machine without a network.

The versions are those of this environment, with which the tests ran. numpy is not among them: it is larger than all of
them together, and a machine with torch has it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Final

WHEELS: Final = (
    "megatron-core",
    "einops",
    "packaging",
    "psutil",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
    "safetensors",
    "tokenizers",
    "xxhash",
    "zstandard",
)
LIMIT_BYTES: Final = 16 * 1024 * 1024
PLATFORMS: Final = tuple(f"manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1"))
"""pip takes a wheel for one of these tags only if the tag is named."""
SITE: Final = "/tmp/headrace-gpu-check"
"""Folder for the packages on the machine."""


class WheelsRefused(Exception):
    """The wheels cannot be fetched, or are too large together."""


def fetch_wheels(folder: Path, *, python: str) -> dict[str, int]:
    """Download the wheels for a version of Python on Linux on x86-64 into an empty folder, and return the bytes of
    each. Raises WheelsRefused, and then leaves the folder as it was."""
    if folder.exists() and any(folder.iterdir()):
        # Of two versions of a package, the machine's pip would install neither.
        raise WheelsRefused(f"{folder} is not empty: name a new folder")
    tags = [word for tag in PLATFORMS for word in ("--platform", tag)]
    wanted = [f"{name}=={version(name)}" for name in WHEELS]
    with tempfile.TemporaryDirectory() as fetched:
        options = ("--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *options, *tags]
        done = subprocess.run([*command, "--dest", fetched, *wanted], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise WheelsRefused(f"pip could not fetch the wheels for Python {python}: {done.stderr.strip()}")
        sizes = {path.name: path.stat().st_size for path in sorted(Path(fetched).iterdir())}
        if (total := sum(sizes.values())) > LIMIT_BYTES:
            largest = max(sizes, key=lambda name: sizes[name])
            raise WheelsRefused(
                f"the wheels take {total:,} bytes, and {LIMIT_BYTES:,} can be carried; the largest is {largest} with "
                f"{sizes[largest]:,}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        for name in sizes:
            shutil.move(Path(fetched) / name, folder / name)
    return sizes


def commands(folder: Path) -> tuple[str, str]:
    """Return the two commands to run at the root of a copy of the repository on the machine, which has the wheels in
    `folder`."""
    options = "--quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade"
    return (
        f"python3 -m pip install {options} --target {SITE} {shlex.quote(str(folder))}/*.whl",
        f"HEADRACE_GPU_PYTHON=python3 PYTHONPATH={SITE} scripts/gpu_check --json",
    )
