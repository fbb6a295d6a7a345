"""Programs of others that slow tests need: `scripts/install` puts them into the user's cache, and prints their path."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).resolve().parents[2] / "scripts" / "install"


def installed(name: str, *, timeout_s: float) -> Path:
    """Install a program, and return the path that is printed. Skips the test, with the reason, where that fails."""
    ran = subprocess.run([INSTALL, name], capture_output=True, text=True, timeout=timeout_s, check=False)
    if ran.returncode:
        pytest.skip(f"scripts/install {name} failed: {(ran.stderr.strip().splitlines() or ['?'])[-1]}")
    return Path(ran.stdout.strip())
