"""Advantages of a sealed group, fixed once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

AdvantageKind = Literal["grpo", "centered"]
SCALE_FLOOR = 1e-6


def zero_variance(rewards: Sequence[float]) -> bool:
    """All rewards are equal: the group says nothing about which member did better."""
    return max(rewards) == min(rewards)


def advantages(rewards: Sequence[float], kind: AdvantageKind) -> tuple[float, ...]:
    """Advantage of each member against the mean of the *other* members' rewards (at least two).

    `grpo`: `(r_i - mean(r_j, j != i)) / (std(r) + 1e-6)` with the population deviation of the whole group
    (DeepSeekMath, arXiv:2402.03300, with the leave-one-out mean of arXiv:2402.14740). `centered`: without the division
    (arXiv:2503.20783). A group without variance has advantage 0 throughout.
    """
    if zero_variance(rewards):
        return (0.0,) * len(rewards)
    count, total = len(rewards), math.fsum(rewards)
    mean = total / count
    deviation = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / count)
    scale = deviation + SCALE_FLOOR if kind == "grpo" else 1.0
    return tuple((reward - (total - reward) / (count - 1)) / scale for reward in rewards)
