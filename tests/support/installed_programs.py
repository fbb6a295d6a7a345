"""Programs of others that slow tests need: the scripts that install them into the user's cache print where they are."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def installed(script: str, *, timeout_s: float) -> Path:
    """Run the script, and return the path that it prints. Skips the test, with the reason, where it fails."""
    ran = subprocess.run([SCRIPTS / script], capture_output=True, text=True, timeout=timeout_s, check=False)
    if ran.returncode:
        pytest.skip(f"{script} failed: {(ran.stderr.strip().splitlines() or ['?'])[-1]}")
    return Path(ran.stdout.strip())
