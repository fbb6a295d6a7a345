"""Advantages of a sealed group, with baselines and scales that are fixed when it is sealed.

Invariants:
- A member's baseline never depends on its own speed or reward: it is the mean over the other members that would
  have finished in time if this member had finished at the group's start. (Applying the mean over early finishers to
  late ones would bias the gradient just as cancelling the late ones does.)
- A scale is the standard deviation of the whole group or of earlier complete groups, never that of the early
  finishers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.buffer.core.acceptance import AcceptanceRule, GroupView

AdvantageKind = Literal["grpo", "centered"]
SCALE_EPSILON = 1e-6
SCALE_FLOOR = 0.1
"""Lower limit of a scale taken from history."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finish:
    """End of a member: its time and reward."""

    at_s: float
    reward: float


def zero_variance(rewards: Sequence[float]) -> bool:
    """True if all rewards are equal, i.e. no member did better than another."""
    return max(rewards) == min(rewards)


def mean(rewards: Sequence[float]) -> float:
    """Return the mean; for equal rewards it is exactly their value. Raises ValueError if there are no rewards."""
    return rewards[0] if zero_variance(rewards) else math.fsum(rewards) / len(rewards)


def deviation_square_sum(rewards: Sequence[float]) -> float:
    """Return the sum of squared distances from the mean."""
    center = mean(rewards)
    return math.fsum((reward - center) ** 2 for reward in rewards)


def full_scale(rewards: Sequence[float]) -> float:
    """Return the scale of `grpo` for a complete group: population standard deviation + 1e-6 (DeepSeekMath,
    arXiv:2402.03300).

    It is 1 for equal rewards: their advantages are 0 anyway, and a member that is issued again may get a different
    reward."""
    if zero_variance(rewards):
        return 1.0
    return math.sqrt(deviation_square_sum(rewards) / len(rewards)) + SCALE_EPSILON


def history_scale(own: tuple[float, int], pooled: tuple[float, int]) -> float:
    """Return the scale of `grpo` for a group with running members, from (sum of squares within complete groups, number
    of their members) of the task so far (`own`), or else of all tasks (`pooled`); 1 if there are no such groups."""
    for squares, members in (own, pooled):
        if members:
            return max(SCALE_FLOOR, math.sqrt(max(0.0, squares) / members))
    return 1.0


def baseline(
    rule: AcceptanceRule, others: Sequence[Finish], *, size: int, min_members: int, opened_at_s: float
) -> float:
    """Return the mean reward of the other members that finished by the time at which the rule would have accepted if
    this member had finished at once (leave-one-out, arXiv:2402.14740).

    `others` are those that had finished when the group was sealed; there must be at least one. `expiring` counts as
    true from the time of sealing. A member that is still running or has ended without a result is never counted.
    """
    ordered = sorted(others)
    for prefix in range(min_members - 1, len(ordered)):
        last = ordered[prefix - 1].at_s
        view = GroupView(size=size, finished=prefix + 1, running=1, opened_at_s=opened_at_s, last_finished_at_s=last)
        if max(rule.since(view), last) < ordered[prefix].at_s:
            return mean([finish.reward for finish in ordered[:prefix]])
    return mean([finish.reward for finish in ordered])


def advantage(reward: float, baseline: float, scale: float) -> float:
    """Return `(reward - baseline) / scale`."""
    return (reward - baseline) / scale
