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


def quickstart(folder: Path, *options: str) -> dict[str, Any]:
    """The summary of a quickstart with further options."""
    out, environment = folder / "out.json", {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = [str(ROOT / "scripts" / "quickstart"), "--json", str(out), "--quiet", *options]
    subprocess.run([*command, "--runs-dir", str(folder / "runs")], check=True, env=environment, timeout=1500)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(tmp_path: Path, seed: int) -> None:
    result = quickstart(tmp_path, "--seed", str(seed))
    assert result["final_success"] >= 0.85
    assert result["final_success"] >= 2 * result["base_success"]
    assert result["evaluation_answers"] >= 256
    assert result["evaluation_infra"] == 0
    assert result["steps"] == 48
    assert result["mean_staleness"] > 0
    assert result["max_staleness_seen"] <= result["max_staleness"]
    assert (result["trained_twice"], result["lost"], result["sandboxes_leaked"]) == (0, 0, 0)
    assert result["in_flight_at_push_min"] > 0


@pytest.mark.parametrize(("rewards", "ranks"), [("true", 1), ("true", 2), ("shuffled", 2)])
def test_gspo_with_a_leave_one_out_baseline_learns_from_true_rewards_only(
    tmp_path: Path, rewards: str, ranks: int
) -> None:
    keys = (
        "learner.objective=gspo",
        "buffer.advantage=leave_one_out",
        f"training.rewards={rewards}",
        f"learner.ranks={ranks}",
    )
    result = quickstart(tmp_path, *(word for key in keys for word in ("--set", key)))
    assert result["steps"] == 48
    learned = result["final_success"] >= 2 * result["base_success"]
    assert learned == (rewards == "true")
