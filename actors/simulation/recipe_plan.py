"""The part of a simulation's plan that a recipe with machine files decides.

Invariant: only sizes and rules come from the recipe. It knows no durations: those of agents, learner and push stay the
preset's, or are given with `--set`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.actors.errors import ConfigError
from headrace.actors.run.overlays import load_layered

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAMED = ("batch_size", "group_size", "max_staleness", "mode", "rule")
"""Keys of [buffer] that are keys of a plan."""


def plan_keys(recipe: Path, on: Sequence[Path]) -> dict[str, Any]:
    """Return the keys of a plan that a recipe with machine files `on` decides. Raises ConfigError."""
    config = load_layered(recipe, on, (), Path("run"))
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
