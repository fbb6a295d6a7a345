"""The machine files that come with headrace, with what they need to know of a cluster."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from headrace.actors.run.config import resolve, slime_terms
from headrace.actors.run.overlays import layered
from headrace.policies.learners.slime.arguments import SlimeTerms

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
MACHINES = {path.stem: path for path in sorted((SCRIPTS / "machines").glob("*.toml"))}
SLIME = [name for name, path in MACHINES.items() if tomllib.loads(path.read_text())["learner"]["kind"] == "slime"]
"""Machine files on which slime trains."""
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
SLIME_MODELS = {name: MODELS.get(name, "Qwen3-4B") for name in SLIME} | {"glm4.7_355b_96gpu": "GLM-4.7"}
"""Models of `published_configs` that machine files for slime are for."""


def examples(machine: Path) -> list[str]:
    """Return the examples in a machine file of the keys that only its user knows, for `--set`."""
    needs = tomllib.loads(machine.read_text()).get("needs", {})
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in needs.items()]


def slime_terms_on(machine: str, model: Path, run_dir: Path, *more: str) -> SlimeTerms:
    """Return what Claude Code's recipe decides for slime on a machine file, for a model directory."""
    recipe, path = SCRIPTS / "recipes" / "claude_code.toml", MACHINES[machine]
    document = layered(recipe, (path,), (*examples(path), f"model.path={model}", *more)).document
    return slime_terms(resolve(document, recipe, run_dir))
