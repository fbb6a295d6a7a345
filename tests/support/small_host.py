"""A host with few processes and open files: other files lie over these totals, for one program only."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_on_small_host(folder: Path, script: str, totals: Mapping[str, int], timeout_s: float = 300) -> str:
    """Run a Python script where the files of `totals`, below /proc/sys, have these values, and return its output."""
    mounts = []
    for number, (name, value) in enumerate(totals.items()):
        (folder / str(number)).write_text(f"{value}\n")
        mounts.append(f"mount --bind {folder / str(number)} /proc/sys/{name}")
    (folder / "script.py").write_text(script)
    command = " && ".join([*mounts, f"exec {sys.executable} {folder / 'script.py'}"])
    done = subprocess.run(
        ("unshare", "--mount", "sh", "-c", command), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
