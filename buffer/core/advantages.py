"""Advantages of a sealed group, with baselines and scales that are fixed when it is sealed.

With a member's reward R, the mean B of the others' rewards, the mean M and the sample deviation S (divisor n - 1) of
all n rewards:

| kind | advantage | source |
|---|---|---|
| `grpo` | (R - M) / (S + 1e-6) | DeepSeekMath, arXiv:2402.03300 |
| `grpo_no_std` | R - M | Dr. GRPO, arXiv:2503.20783 |
| `leave_one_out` | R - B | RLOO, arXiv:2402.14740 |

Invariants:
- A member's baseline never depends on its own speed or reward: it is the mean over the other members that would
  have finished in time if this member had finished at the group's start. (Applying the mean over early finishers to
  late ones would bias the gradient just as cancelling the late ones does.) In a complete group these are all others,
  unless the member itself held the group open for them.
- The mean that includes the member is computed from this baseline, because R - M = (n - 1) / n * (R - B). So members of
  groups sealed early get the same factor, and their expected gradient is that of complete groups.
- A scale comes from the deviation of the whole group or of earlier complete groups, never from that of the early
  finishers.
- Every advantage is (R - B) / scale. With `grpo` it is at most (n - 1) / sqrt(n), as in every complete group
  (Samuelson's inequality): a history of similar rewards cannot give one member of an early group a huge weight.

With scores of steps (`step_scores`), the value of a turn is outcome + coefficient x score. It is normalised over the
bucket of its turn, the members of the group with a score for the turn that had finished when the group was sealed
(OpenClaw-RL, `step_wise`):

| bucket | advantage of the turn |
|---|---|
| two or more values that differ | (value - mean) / (population deviation + 1e-6), at most sqrt(n - 1) |
| two or more equal values | 0 |
| one value | the value |

A turn that is in no bucket, in a member that was issued again, counts like one with a single value. A turn without a
score has the advantage of its rollout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from headrace.buffer.core.acceptance import AcceptanceRule, GroupView

AdvantageKind = Literal["grpo", "grpo_no_std", "leave_one_out"]
SCALE_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finish:
    """End of a member: its time and reward."""

    at_s: float
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpread:
    """Sums over complete groups sealed with `grpo`: of the squared distances of rewards from their group's mean, and of
    (n - 1) * S."""

    grpo_square_sum: float = 0.0
    grpo_deviation_sum: float = 0.0


class _TurnValues(NamedTuple):
    """Values of one turn in a group: their number, mean and population deviation."""

    size: int
    mean: float
    deviation: float


Buckets: TypeAlias = "dict[int, _TurnValues]"
"""Buckets of a group, by turn number."""


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


def deviation_sum(rewards: Sequence[float]) -> float:
    """Return (n - 1) * S of the n rewards of a complete group, at least two."""
    return math.sqrt(deviation_square_sum(rewards) * (len(rewards) - 1))


def group_scale(
    kind: AdvantageKind, rewards: Sequence[float] | None, *, members: int, own: RewardSpread, pooled: RewardSpread
) -> float:
    """Return the scale of a group's advantages. `rewards` are those of a complete group, None if members are running;
    `members` counts those with a baseline; `own` and `pooled` cover the earlier groups of the task and of all tasks."""
    with_itself = members / (members - 1)
    match kind:
        case "leave_one_out":
            return 1.0
        case "grpo_no_std":
            return with_itself
        case "grpo":
            # In a flat group all advantages are 0. A member that is issued again may get a different reward.
            if rewards is None or zero_variance(rewards):
                deviation = _history_deviation(own, pooled)
            else:
                deviation = math.sqrt(deviation_square_sum(rewards) / (len(rewards) - 1))
            return with_itself * (deviation + SCALE_EPSILON)


def _history_deviation(own: RewardSpread, pooled: RewardSpread) -> float:
    """Return the deviation by which the advantages of earlier complete groups would have been as large in sum as by
    each group's own: sum of (n - 1) S^2 over sum of (n - 1) S, of the task, or else of all tasks; 1 without any.

    Flat groups add nothing to either sum. For rewards of two values, dividing by it gives exactly the expected gradient
    that dividing each complete group by its own S gives, E[S] / E[S^2] times that of the mean reward.
    """
    for spread in (own, pooled):
        if spread.grpo_deviation_sum > 0.0:
            return spread.grpo_square_sum / spread.grpo_deviation_sum
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


def advantage(kind: AdvantageKind, reward: float, baseline: float, scale: float, *, members: int) -> float:
    """Return `(reward - baseline) / scale`, with `grpo` at most what a complete group of `members` can give."""
    value = (reward - baseline) / scale
    if kind != "grpo":
        return value
    largest = (members - 1) / math.sqrt(members)
    return max(-largest, min(largest, value))


def buckets_of(members: Iterable[Mapping[int, float]]) -> Buckets:
    """Return the buckets of a group from the values of its members' turns."""
    by_turn: dict[int, list[float]] = {}
    for values in members:
        for turn, value in values.items():
            by_turn.setdefault(turn, []).append(value)
    return {
        turn: _TurnValues(len(values), mean(values), math.sqrt(deviation_square_sum(values) / len(values)))
        for turn, values in sorted(by_turn.items())
    }


def turn_advantages(values: Mapping[int, float], buckets: Mapping[int, _TurnValues]) -> dict[int, float]:
    """Return the advantages of the turns that have a value."""
    return {turn: _turn_advantage(value, buckets.get(turn)) for turn, value in values.items()}


def _turn_advantage(value: float, bucket: _TurnValues | None) -> float:
    if bucket is None or bucket.size == 1:
        return value
    if bucket.deviation == 0.0:
        return 0.0
    largest = math.sqrt(bucket.size - 1)
    return max(-largest, min(largest, (value - bucket.mean) / (bucket.deviation + SCALE_EPSILON)))
