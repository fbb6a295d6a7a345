"""The main job as its user runs it. Slow: several minutes each."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(tmp_path: Path, seed: int) -> None:
    out, environment = tmp_path / "out.json", {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [str(ROOT / "scripts" / "quickstart"), "--json", str(out), "--seed", str(seed), "--quiet"]
    subprocess.run([*command, "--runs-dir", str(tmp_path / "runs")], check=True, env=environment, timeout=1500)
    result: dict[str, Any] = json.loads(out.read_text())
    assert result["final_success"] >= 0.75
    assert result["final_success"] >= 2 * result["base_success"]
    assert result["evaluation_answers"] >= 256
    assert result["evaluation_infra"] == 0
    assert result["steps"] == 40
    assert result["mean_staleness"] > 0
    assert result["max_staleness_seen"] <= result["max_staleness"]
    assert (result["trained_twice"], result["lost"], result["sandboxes_leaked"]) == (0, 0, 0)
    assert result["in_flight_at_push_min"] > 0
