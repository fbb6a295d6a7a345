"""The evaluator `http`: a server of the user scores the record of an episode.

Invariants:
- Hidden files, checks, the environment's secret and paths of this machine are never sent; `expected` is, since it is
  written for the server.
- A request that is sent again after a lost answer has the same key.
"""

from __future__ import annotations

from typing import Any

from headrace.actors.evaluation.graders.functions import document_of
from headrace.actors.evaluation.graders.verdict import EpisodeRecord, EvaluationRequest, Verdict, rewarded_by
from headrace.actors.services.service import RewardServer
from headrace.buffer.tasks.evaluators import HttpEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.sanitizer import without_surrogates


async def score_by_server(
    spec: HttpEvaluator, task: Task, request: EvaluationRequest, episode: EpisodeRecord, server: RewardServer
) -> Verdict:
    """Return the verdict of a reward server. Raises ServiceDown, EvaluatorFault."""
    document = {
        "key": request.key,
        "task": shown_task(task, spec.expected),
        "episode": without_surrogates(document_of(episode)),
    }
    return rewarded_by(await server.score(document))


def shown_task(task: Task, expected: str) -> dict[str, Any]:
    """Return the parts of a task that a reward server gets."""
    return {
        "id": task.id,
        "family": task.family,
        "instruction": task.instruction,
        "messages": [{"role": message.role, "content": message.content} for message in task.messages],
        "given": dict(task.environment.given) if task.environment is not None else {},
        "expected": expected,
    }
