"""Evaluators of other packages: a function that scores what an agent left.

Invariants:
- Whatever such a function does wrong (an exception, no verdict, a reward that is no number, too much time) is the
  evaluator's fault: no reward comes of it.
- What the sandboxes do wrong stays infra.
"""

from __future__ import annotations

import asyncio
from functools import cache
from inspect import iscoroutinefunction
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.verdict import Verdict, broken
from headrace.buffer.primitives.registry import PartRefused, Registry
from headrace.buffer.types import Cause, check_reward
from headrace.sandboxes.errors import SandboxError, SandboxFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from headrace.actors.evaluation.verdict import CleanSandboxes, EvaluationRequest
    from headrace.buffer.tasks import Task

    Score: TypeAlias = Callable[[EvaluationRequest, CleanSandboxes], Coroutine[Any, Any, Verdict]]


def _function(found: object) -> Score:
    if not iscoroutinefunction(found):
        raise TypeError("it is no `async def` function of a request and clean rooms")
    score: Score = found
    return score


EVALUATORS: Final[Registry[Score]] = Registry(kind="evaluator", group="headrace.evaluators", own={}, accept=_function)


# For every rollout: to look through the entry points of an environment takes tens of milliseconds.
_evaluator = cache(EVALUATORS.find)


def refuse_absent_evaluators(tasks: Iterable[Task]) -> None:
    """Raises ConfigError for the first name that leads to no evaluator."""
    for name, task in {task.evaluator.plugin: task for task in tasks if task.evaluator.plugin}.items():
        try:
            EVALUATORS.find(name)
        except PartRefused as error:
            raise ConfigError(f"task {task.id}: evaluator.plugin: {error}") from error


async def score_by_plugin(request: EvaluationRequest, rooms: CleanSandboxes) -> Verdict:
    """The agent's sandbox is frozen by now. Raises SandboxError."""
    spec = request.task.evaluator
    try:
        async with asyncio.timeout(spec.timeout_s):
            verdict = await _evaluator(spec.plugin)(request, rooms)
    except SandboxFileError as error:
        # A file that is missing or too large is what the agent left: to expect that is the evaluator's task.
        return broken(f"{spec.plugin} did not expect: {error}")
    except SandboxError:
        raise
    except TimeoutError:
        return broken(f"{spec.plugin} outlived timeout_s={spec.timeout_s:g}")
    except Exception as error:  # noqa: BLE001 - somebody else's code may raise what it likes
        return broken(f"{spec.plugin} raised {type(error).__name__}: {error}")
    fault = _fault_of(verdict)
    return broken(f"{spec.plugin}: {fault}") if fault else verdict


def _fault_of(verdict: object) -> str:
    """Why this is no verdict; empty for one."""
    if not isinstance(verdict, Verdict):
        return f"it gave {type(verdict).__name__} instead of a Verdict"
    if verdict.reward is None:
        return "" if verdict.cause in (Cause.EVALUATOR, Cause.INFRA) else f"cause {verdict.cause} without a reward"
    try:
        check_reward(verdict.reward)
    except ValueError as error:
        return str(error)
    return ""
