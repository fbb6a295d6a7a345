"""The machine files that come with headrace, with what they need to know of a cluster."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

MACHINES = {
    path.stem: path for path in sorted((Path(__file__).resolve().parents[2] / "scripts" / "machines").glob("*.toml"))
}
MODELS = {
    "8gpu_megatron": "Qwen3-0.6B",
    "8gpu_35b": "Qwen3.6-35B-A3B",
    "64gpu": "Qwen3.6-35B-A3B",
    "swe_rl_32b_64gpu": "Qwen3-32B",
    "swe_rl_32b_32gpu": "Qwen3-32B",
    "swe_rl_8b_16gpu": "Qwen3-8B",
    "swe_rl_8b_judge_40gpu": "Qwen3-8B",
}
"""Models that machine files are for; the others are for a dense one of 4B, or of another maker."""


def examples(machine: Path) -> list[str]:
    """Return the examples in a machine file of the keys that only its user knows, for `--set`."""
    needs = tomllib.loads(machine.read_text()).get("needs", {})
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in needs.items()]
