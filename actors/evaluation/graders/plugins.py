"""Evaluators from other packages, which are functions that score an agent's files.

Invariants:
- Every error in such a function (an exception, a missing verdict, a reward that is not a number, a timeout) is the
  evaluator's fault and yields no reward.
- Sandbox errors remain infra.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from inspect import iscoroutinefunction
from typing import Any, Final, TypeAlias

from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.graders.verdict import CleanSandboxes, EvaluationRequest, Verdict, broken
from headrace.buffer.primitives.registry import PartRefused, Registry
from headrace.buffer.tasks.evaluators import PluginEvaluator
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.types import Cause, check_reward
from headrace.sandboxes.errors import SandboxError, SandboxFileError

Score: TypeAlias = Callable[[Task, EvaluationRequest, CleanSandboxes], Coroutine[Any, Any, Verdict]]


def _function(found: object) -> Score:
    if not iscoroutinefunction(found):
        raise TypeError("it is not an `async def` function; define `async def score(task, request, sandboxes)`")
    score: Score = found
    return score


EVALUATORS: Final[Registry[Score]] = Registry(kind="evaluator", group="headrace.evaluators", own={}, accept=_function)


# Cached, since scanning the entry points of an environment takes tens of milliseconds per rollout.
_evaluator = cache(EVALUATORS.find)


def refuse_absent_evaluators(tasks: Iterable[Task]) -> None:
    """Check that all evaluators named by the tasks exist. Raises ConfigError for the first one that does not."""
    named = {spec.plugin: task for task in tasks for spec in task.evaluators if isinstance(spec, PluginEvaluator)}
    for name, task in named.items():
        try:
            EVALUATORS.find(name)
        except PartRefused as error:
            raise ConfigError(f"task {task.id}: evaluator.plugin: {error}") from error


async def score_by_plugin(
    spec: PluginEvaluator, task: Task, request: EvaluationRequest, sandboxes: CleanSandboxes
) -> Verdict:
    """Score a rollout whose sandbox is frozen, or that had none. Raises SandboxError."""
    try:
        async with asyncio.timeout(spec.timeout_s):
            verdict = await _evaluator(spec.plugin)(task, request, sandboxes)
    except SandboxFileError as error:
        # The evaluator must expect missing or too large files, since the agent controls them.
        return broken(f"{spec.plugin} did not handle a file error: {error}")
    except SandboxError:
        raise
    except TimeoutError:
        return broken(f"{spec.plugin} exceeded timeout_s={spec.timeout_s:g}")
    except Exception as error:  # noqa: BLE001 - code of other packages may raise anything
        return broken(f"{spec.plugin} raised {type(error).__name__}: {error}")
    if not isinstance(verdict, Verdict):
        return broken(f"{spec.plugin}: returned {type(verdict).__name__} instead of a Verdict")
    if verdict.reward is None and verdict.cause not in (Cause.EVALUATOR, Cause.INFRA):
        return broken(f"{spec.plugin}: returned cause {verdict.cause} without a reward")
    try:
        if verdict.reward is not None:
            check_reward(verdict.reward)
    except ValueError as error:
        return broken(f"{spec.plugin}: {error}")
    return verdict
