"""The advantages that a group's results imply, for `verify`: the definitions of each kind, written a second time.

Invariant: nothing is shared with `buffer.core.advantages`, which this checks. Only the meaning of a rule (`acceptance`)
is common: when it accepts a given group.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from headrace.buffer.core.acceptance import AcceptanceRule, GroupView, effective_since
from headrace.buffer.trajectories.step_scores import StepScores

KINDS: Final = frozenset({"grpo", "grpo_no_std", "leave_one_out"})
_EPSILON: Final = 1e-6


class Result(NamedTuple):
    """First result of a member: when it arrived, and its reward."""

    at_s: float
    reward: float


@dataclass(slots=True)
class CompleteGroups:
    """Sums over the complete groups of a task, or of all tasks, that had been sealed with `grpo` when a group was
    sealed: squared distances from their group's mean, and (members - 1) * deviation."""

    squares: float = 0.0
    deviations: float = 0.0

    def add(self, rewards: Collection[float], kind: str | None) -> None:
        """Add a group that was sealed with this kind of advantages."""
        if kind == "grpo":
            squares = _squares(rewards)
            self.squares += squares
            self.deviations += math.sqrt(squares * (len(rewards) - 1))


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
        return self._deviation / (1 - 1 / self.members if self._with_itself else 1.0)

    def advantage(self, reward: float, baseline: float) -> float:
        """Return the advantage of a reward, in the published form if the mean includes the member: the others count by
        their mean, the baseline."""
        mean = (reward + (self.members - 1) * baseline) / self.members if self._with_itself else baseline
        value = (reward - mean) / self._deviation
        if self.kind != "grpo":
            return value
        # No member of n can be further from their mean, in sample deviations.
        limit = math.sqrt(self.members) - 1 / math.sqrt(self.members)
        return math.copysign(min(abs(value), limit), value)

    @property
    def _with_itself(self) -> bool:
        return self.kind in ("grpo", "grpo_no_std")

    @property
    def _deviation(self) -> float:
        if self.kind == "grpo":
            if self.rewards is not None and (squares := _squares(self.rewards)):
                return math.sqrt(squares / (len(self.rewards) - 1)) + _EPSILON
            history = self.own if self.own.deviations else self.pooled
            typical = history.squares / history.deviations if history.deviations else 1.0
            return typical + _EPSILON
        return 1.0


def _squares(rewards: Collection[float]) -> float:
    """Return the sum of squared distances from the mean: exactly 0 if all rewards are equal."""
    if len(set(rewards)) == 1:
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum((reward - mean) ** 2 for reward in rewards)


def expected_turns(values: Mapping[int, float], members: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the advantages of a rollout's turns from their values. `members` have the values of each member's first
    result that had arrived when the group was sealed, by turn."""
    expected = {}
    for turn, value in values.items():
        others = [member[turn] for member in members if turn in member]
        if len(others) < 2:
            expected[turn] = value
        elif len(set(others)) == 1:
            expected[turn] = 0.0
        else:
            mean = math.fsum(others) / len(others)
            deviation = math.sqrt(_squares(others) / len(others))
            distance = (value - mean) / (deviation + _EPSILON)
            # None of n values is further from their mean, in population deviations.
            expected[turn] = math.copysign(min(abs(distance), math.sqrt(len(others) - 1)), distance)
    return expected


def expected_reward(scores: StepScores) -> float:
    """Return the reward that follows from an outcome and the scores of steps."""
    if scores.credit == "steps" or not scores.steps:
        return scores.outcome
    return scores.outcome + scores.coefficient * math.fsum(step.score for step in scores.steps) / len(scores.steps)


def expected_values(scores: StepScores | None) -> dict[int, float]:
    """Return the values of an attempt's turns, by turn."""
    if scores is None or scores.credit != "steps":
        return {}
    return {step.turn: scores.outcome + scores.coefficient * step.score for step in scores.steps}
