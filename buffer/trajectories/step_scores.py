"""Scores of a judge for the steps of one attempt, and the tokens that belong to each step.

Invariants:
- A step is a turn of the agent, from 1. A step without a valid vote has no score and is not listed: it never counts
  as 0.
- The spans of a step are trained tokens that the policy sampled in this turn. Spans of a row do not overlap.
- `reward` follows from the outcome and the scores alone, so that `ledger verify` can compute it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple, TypeAlias

TurnAdvantages: TypeAlias = Mapping[int, float]
"""Advantages of single turns, by turn number. Other turns have the advantage of their rollout."""
MAX_SCORE: Final = 1e6
"""Maximum absolute value of a score, of the coefficient and of their product."""


class Credit(StrEnum):
    """Use of a judge's scores of steps."""

    REWARD = "reward"
    """The mean score, times the coefficient, is added to the reward of the rollout."""
    STEPS = "steps"
    """Each turn with a score has an advantage of its own: outcome + coefficient x score, normalised over the rollouts
    of the group that have a score for the same turn."""


class TokenSpan(NamedTuple):
    """Tokens `[start, end)` of a row of the trajectory."""

    row: int
    start: int
    end: int


class ScoredStep(NamedTuple):
    """Step with a score. `turn` counts the policy's answers from 1."""

    turn: int
    score: float
    spans: tuple[TokenSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepScores:
    """Scores of an attempt's steps. `outcome` is the evaluator's reward, without the judge."""

    credit: Credit
    outcome: float
    coefficient: float
    steps: tuple[ScoredStep, ...]

    @property
    def mean(self) -> float | None:
        """Mean score of the steps, or None if no step has one."""
        return sum(step.score for step in self.steps) / len(self.steps) if self.steps else None

    @property
    def reward(self) -> float:
        """Reward of the rollout."""
        if self.credit is Credit.STEPS or self.mean is None:
            return self.outcome
        return self.outcome + self.coefficient * self.mean

    @property
    def values(self) -> dict[int, float]:
        """Value of each turn with a score, outcome + coefficient x score; empty if they do not act on single turns."""
        if self.credit is not Credit.STEPS:
            return {}
        return {step.turn: self.outcome + self.coefficient * step.score for step in self.steps}

    def to_json(self) -> str:
        """Return the JSON form."""
        steps = [[step.turn, step.score, [list(span) for span in step.spans]] for step in self.steps]
        document = {"credit": self.credit.value, "outcome": self.outcome, "coefficient": self.coefficient}
        return json.dumps(document | {"steps": steps}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StepScores:
        """Return the scores from their JSON form."""
        document = json.loads(text)
        return cls(
            credit=Credit(document["credit"]),
            outcome=document["outcome"],
            coefficient=document["coefficient"],
            steps=tuple(
                ScoredStep(turn, score, tuple(TokenSpan(*span) for span in spans))
                for turn, score, spans in document["steps"]
            ),
        )
