"""Rewards of verdicts: those of a task's map, sums of several evaluators, and the scores of a judge.

Invariants:
- A verdict without a reward stays without: no map, sum or judge gives one to a fault of the evaluator or to infra.
- A missing vote of a judge is missing; it never counts as 0. A step without votes has no score.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from headrace.actors.evaluation.graders.verdict import (
    EvaluationRequest,
    EvaluatorFault,
    Verdict,
    broken,
    join_details,
    printed,
    rewarded,
)
from headrace.buffer.tasks.evaluators import EvaluatorPart, RewardMap, SumEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.step_scores import Credit, ScoredStep, StepScores, TokenSpan
from headrace.serve.gateway.capture.rows import Lineage

Score: TypeAlias = Callable[[Task, EvaluationRequest], Awaitable[Verdict]]
"""Function that scores by one evaluator, which is no sum."""


def with_rewards(verdict: Verdict, rewards: RewardMap | None) -> Verdict:
    """Return a verdict with the rewards of a task in place of its own; one without a reward stays without."""
    if rewards is None or verdict.reward is None:
        return verdict
    return replace(verdict, reward=rewards.solved if verdict.solved else rewards.failed)


async def score_task(task: Task, request: EvaluationRequest, score: Score) -> Verdict:
    """Return the verdict of a task's evaluator by `score`, with the task's rewards. Of a sum, every part is scored, in
    order, until one yields no reward."""
    spec = task.evaluator
    if not isinstance(spec, SumEvaluator):
        return with_rewards(await score(task, request), spec.rewards)
    named = []
    for part in spec.parts:
        own = replace(request, part=part.name, key=f"{request.key}.{part.name}")
        named.append((part, await score_task(replace(task, evaluator=part.evaluator), own, score)))
        if named[-1][1].reward is None:
            break
    try:
        return with_rewards(summed(named), spec.rewards)
    except EvaluatorFault as error:
        return broken(str(error))


def summed(named: Sequence[tuple[EvaluatorPart, Verdict]]) -> Verdict:
    """Return the verdict of a sum from its parts and their verdicts; the first one decides whether the task is solved.
    If a part has no reward, the sum has none. Raises EvaluatorFault if the sum is out of bounds."""
    for part, verdict in named:
        if verdict.reward is None:
            return replace(verdict, detail=f"{part.name}: {verdict.detail}", parts={})
    first = named[0][1]
    parts = {part.name: (float(verdict.reward or 0.0), part.weight) for part, verdict in named}
    details = [f"{part.name} {verdict.reward:g} x {part.weight:g}" for part, verdict in named]
    details += [f"{part.name}: {verdict.detail}" for part, verdict in named if verdict.detail]
    total = rewarded(sum(reward * weight for reward, weight in parts.values()), solved=first.solved)
    return replace(
        total,
        cause=first.cause,
        detail=join_details(*details),
        log=printed(*(verdict.log for _, verdict in named)),
        patch=next((verdict.patch for _, verdict in named if verdict.patch), ""),
        parts=parts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Votes on the steps of one episode, by turn; a missing vote is None. `ids` are the turns' ids in the gateway's
    report of the session."""

    votes: Mapping[int, tuple[int | None, ...]]
    coefficient: float
    credit: Credit = Credit.REWARD
    ids: Mapping[int, str] = field(default_factory=dict)

    @property
    def scores(self) -> dict[int, float]:
        """Mean vote of each step that has votes, by turn."""
        valid = {turn: [vote for vote in votes if vote is not None] for turn, votes in self.votes.items()}
        return {turn: sum(votes) / len(votes) for turn, votes in valid.items() if votes}

    @property
    def mean(self) -> float | None:
        """Mean score of the steps that have one, or None."""
        scores = self.scores.values()
        return sum(scores) / len(scores) if scores else None

    def artifact(self) -> str:
        """Return the votes and scores as JSON."""
        scores = self.scores
        steps = [{"turn": turn, "votes": votes, "score": scores.get(turn)} for turn, votes in self.votes.items()]
        document = {"steps": steps, "mean": self.mean, "credit": self.credit, "coefficient": self.coefficient}
        return json.dumps(document)

    def of_tokens(self, outcome: float, lineages: Sequence[Lineage]) -> StepScores:
        """Return the scores with the trained tokens of their turns, for a rollout whose outcome has this reward.
        `lineages` describe the rows of its trajectory."""
        spans: dict[str, list[TokenSpan]] = {}
        for row, lineage in enumerate(lineages):
            for turn_id, start, end in lineage.turns:
                spans.setdefault(turn_id, []).append(TokenSpan(row, start, end))
        steps = tuple(
            ScoredStep(turn, score, tuple(spans.get(self.ids.get(turn, ""), ()))) for turn, score in self.scores.items()
        )
        return StepScores(credit=self.credit, outcome=outcome, coefficient=self.coefficient, steps=steps)


def with_judgement(verdict: Verdict, judgement: Judgement | None) -> Verdict:
    """Return a verdict with the judge's mean score added to its reward, unless its steps have credit of their own; it
    changes neither cause nor `solved`."""
    if judgement is None or verdict.reward is None or judgement.credit is Credit.STEPS:
        return verdict
    scores, mean = judgement.scores, judgement.mean
    if mean is None:
        return replace(verdict, detail=join_details(verdict.detail, "no step has a vote"))
    return replace(
        verdict,
        reward=judgement.of_tokens(verdict.reward, ()).reward,
        detail=join_details(verdict.detail, f"judge {mean:+.3g} x {judgement.coefficient:g} over {len(scores)} steps"),
        parts={**(verdict.parts or {"outcome": (verdict.reward, 1.0)}), "judge": (mean, judgement.coefficient)},
    )
