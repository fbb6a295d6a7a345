"""Registry of the learner's objectives, by their names in recipes: headrace's own and those from other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

from headrace.buffer.primitives.registry import Registry

if TYPE_CHECKING:
    import torch

    from headrace.policies.learners.objectives import ClipConfig, LossSums, MicroBatch

Objective: TypeAlias = Callable[
    ["torch.Tensor", "MicroBatch", "ClipConfig", "torch.Tensor"], "tuple[torch.Tensor, LossSums]"
]
"""A loss over the N trained tokens of a micro-batch: (log-probabilities_N, micro-batch, clip configuration,
entropies_N) -> (the weighted sum over the tokens, a scalar; its sums for the metrics). Log-probabilities and entropies
have a gradient. It must return sums and not means, since the weights of the micro-batch fix the reduction."""


def _grpo() -> Objective:
    # Only a learner needs torch: a recipe is checked without it.
    from headrace.policies.learners.objectives import policy_loss

    return policy_loss


def _outside(found: object) -> Callable[[], Objective]:
    if not callable(found):
        raise TypeError("it cannot be called with the log-probabilities")
    objective: Objective = found
    return lambda: objective


OBJECTIVES: Final[Registry[Callable[[], Objective]]] = Registry(
    kind="objective", group="headrace.objectives", own={"grpo": _grpo}, accept=_outside
)
