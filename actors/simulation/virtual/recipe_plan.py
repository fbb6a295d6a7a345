"""The part of a simulation's plan that a recipe with machine files decides.

Invariant: only sizes and rules come from the recipe. It knows no durations: those of agents, learner and push stay the
preset's, or are given with `--set`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.actors.errors import ConfigError
from headrace.actors.run.overlays import load_layered
from headrace.actors.run.sources import KEY
from headrace.actors.simulation.virtual.plan import SimulationPlan

_NAMED = ("batch_size", "group_size", "max_staleness", "mode", "rule")
"""Keys of [buffer] that are keys of a plan."""


def plan_keys(recipe: Path, on: Sequence[Path]) -> dict[str, Any]:
    """Return the keys of a plan that a recipe with machine files `on` decides. Raises ConfigError."""
    config = load_layered(recipe, on, (), Path("run"))
    if config.tasks.sources:
        raise ConfigError(f"simulate: --recipe {recipe}: a plan has no sources; leave {KEY} out of the recipe")
    buffer = config.buffer.model_dump(mode="json")
    others = config.buffer.model_dump(mode="json", exclude_unset=True, exclude=set(_NAMED))
    if config.buffer.group_size < 2:
        raise ConfigError(f"simulate: --recipe {recipe}: buffer.group_size must be at least 2 for a simulation")
    return {
        **{key: buffer[key] for key in _NAMED},
        "buffer": others,
        "slots": config.dispatcher.slots_per_worker * config.service.workers,
        "workers": config.service.workers,
        "save_every": config.training.save_every,
    }


def told(recipe: Path, preset: str, plan: SimulationPlan) -> tuple[str, str]:
    """Return what of a plan comes from a recipe, and what from the preset, as lines of text."""
    sizes = f"batch {plan.batch_size}, groups of {plan.group_size}, {plan.slots} slots, staleness {plan.max_staleness}"
    times = f"agents {plan.mean_s:.0f} s on average, learner {plan.learner_s:g} s a step, push {plan.push_s:g} s"
    return (
        f"sizes of {recipe.name}: {sizes}, mode {plan.mode}",
        f"durations of {preset}, unless --set gives others: {times}",
    )
