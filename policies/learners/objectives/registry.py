"""Registry of objectives, by their names in recipes: headrace's own and those from other packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from headrace.buffer.primitives.registry import PartRefused, Registry
from headrace.policies.learners.objectives.config import OWN, PPO, ObjectiveConfig, corrected_twice

if TYPE_CHECKING:
    from headrace.policies.learners.objectives.loss import Objective


def _own(name: str) -> Callable[[], Objective]:
    def load() -> Objective:
        # Only a learner needs torch: a recipe is checked without it.
        from headrace.policies.learners.objectives import policy
        from headrace.policies.learners.objectives.loss import Objective

        # The buffer's advantage says nothing about a critic's.
        return Objective(loss=getattr(policy, name), uses_zero_advantage=name == PPO)

    return load


def _outside(found: object) -> Callable[[], Objective]:
    from headrace.policies.learners.objectives.loss import Objective

    if not isinstance(found, Objective):
        if not callable(found):
            raise TypeError("it is neither an Objective nor a function of the trained tokens")
        try:
            inspect.signature(found).bind("tokens", "config")
        except TypeError as error:
            text = f"it cannot be called with (tokens, config): {error} (guide 'Extending headrace')"
            raise TypeError(text) from error
        found = Objective(loss=found)
    objective = found
    return lambda: objective


OBJECTIVES: Final[Registry[Callable[[], Objective]]] = Registry(
    kind="objective",
    group="headrace.objectives",
    own={name: _own(name) for name in OWN},
    accept=_outside,
)


def check_objective(config: ObjectiveConfig) -> None:
    """Find the objective. Raises PartRefused if it does not exist or does not go with the correction."""
    found = OBJECTIVES.find(config.objective)
    if config.correction == "weights" and found().uses_ratio:
        raise PartRefused(corrected_twice(config.objective))
