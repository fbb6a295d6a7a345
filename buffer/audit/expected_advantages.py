"""The advantages that a group's results imply, for `verify`: the definitions of each kind, written a second time.

Invariant: nothing is shared with `buffer.core.advantages`, which this checks. Only the meaning of a rule (`acceptance`)
is common: when it accepts a given group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from headrace.buffer.core.acceptance import GroupView, effective_since

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from headrace.buffer.core.acceptance import AcceptanceRule

KINDS: Final = frozenset({"grpo", "grpo_no_std", "leave_one_out", "grpo_first_round"})
_EPSILON: Final = 1e-6
_FLOOR_OF_FIRST_ROUND: Final = 0.1


class Result(NamedTuple):
    """First result of a member: when it arrived, and its reward."""

    at_s: float
    reward: float


@dataclass(slots=True)
class CompleteGroups:
    """Sums over the complete groups of a task, or of all tasks, that were known when a group was sealed: members,
    squared distances from their group's mean, and for groups sealed with `grpo` these and (members - 1) * deviation."""

    members: int = 0
    squares: float = 0.0
    grpo_squares: float = 0.0
    grpo_deviations: float = 0.0

    def add(self, rewards: Collection[float], kind: str | None) -> None:
        """Add a group that was sealed with this kind of advantages."""
        squares = _squares(rewards)
        self.members += len(rewards)
        self.squares += squares
        if kind == "grpo":
            self.grpo_squares += squares
            self.grpo_deviations += math.sqrt(squares * (len(rewards) - 1))


def expected_baseline(
    rule: AcceptanceRule, others: Iterable[Result], *, size: int, min_members: int, opened_at_s: float
) -> float:
    """Return the mean reward of the others that are in if the member itself is in from the start: each that arrives
    before the group would have been sealed without it."""
    seen: list[Result] = []
    for result in sorted(others):
        newest_s = seen[-1].at_s if seen else result.at_s
        view = GroupView(
            size=size, finished=1 + len(seen), running=1, opened_at_s=opened_at_s, last_finished_at_s=newest_s
        )
        if seen and max(effective_since(rule, view, min_members), newest_s) < result.at_s:
            break
        seen.append(result)
    return math.fsum(result.reward for result in seen) / len(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedAdvantages:
    """Formula of one sealed group. `rewards` are the first ones of all members if the group was complete then, else
    None; `members` counts those with a baseline; `own` and `pooled` are the history of its task and of all tasks."""

    kind: str
    rewards: Collection[float] | None
    members: int
    own: CompleteGroups
    pooled: CompleteGroups

    @property
    def scale(self) -> float:
        """Number that divides the distance of a reward from its baseline."""
        return self._deviation / self._share

    def advantage(self, reward: float, first_reward: float | None, baseline: float) -> float:
        """Return the advantage of a reward. In a complete group, the first result of a member is compared with the mean
        of all, as published."""
        if self.kind == "grpo" and self.rewards is not None and reward == first_reward and _squares(self.rewards):
            mean = math.fsum(self.rewards) / len(self.rewards)
            return (reward - mean) / (math.sqrt(_squares(self.rewards) / (len(self.rewards) - 1)) + _EPSILON)
        value = self._share * (reward - baseline) / self._deviation
        if self.kind != "grpo":
            return value
        # No member of n can be further from their mean, in sample deviations.
        limit = math.sqrt(self.members) - 1 / math.sqrt(self.members)
        return math.copysign(min(abs(value), limit), value)

    @property
    def _share(self) -> float:
        """The distance from the mean of all members is this share of that from the mean of the others."""
        return 1 - 1 / self.members if self.kind in ("grpo", "grpo_no_std") else 1.0

    @property
    def _deviation(self) -> float:
        if self.kind not in ("grpo", "grpo_first_round"):
            return 1.0
        first_round = self.kind == "grpo_first_round"
        if self.rewards is not None and (first_round or _squares(self.rewards)):
            squares, divisor = _squares(self.rewards), len(self.rewards) - (0 if first_round else 1)
            return math.sqrt(squares / divisor) + _EPSILON if squares else 1.0
        for history in (self.own, self.pooled):
            if first_round and history.members:
                return max(_FLOOR_OF_FIRST_ROUND, math.sqrt(history.squares / history.members))
            if not first_round and history.grpo_deviations:
                return history.grpo_squares / history.grpo_deviations + _EPSILON
        return 1.0 if first_round else 1.0 + _EPSILON


def _squares(rewards: Collection[float]) -> float:
    """Return the sum of squared distances from the mean: exactly 0 if all rewards are equal."""
    if len(set(rewards)) == 1:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum((reward - mean) ** 2 for reward in rewards)
