"""The check of `headrace data check`: each task is graded in local sandboxes before anything trains on it.

Invariants:
- An untouched sandbox must be graded without a fault of the evaluator, and must not solve the task.
- Where there is a solution, it must solve the task.
- The verdicts are those of a run: the sandboxes are prepared and scored by the same functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from headrace.actors.cli.held_out.task_solutions import HARBOR_FOLDER, SOLUTION, Solution, Solutions
from headrace.actors.evaluation.graders.answer import score_answer
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.actors.evaluation.graders.history import prepare
from headrace.actors.evaluation.graders.rewards import score_task
from headrace.actors.evaluation.graders.verdict import Author, EpisodeRecord, SpokenPart, join_details, task_resources
from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.evaluators import (
    OF_EPISODES,
    AnswerEvaluator,
    AnswerSpec,
    NoEvaluator,
    RepositoryEvaluator,
    SimulatedEvaluator,
    VerifierEvaluator,
)
from headrace.buffer.tasks.task import Task
from headrace.sandboxes.base import Sandbox, SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import SandboxError
from headrace.sandboxes.local.provider import LocalProvider

AT_ONCE: Final = 4
"""Number of tasks that are checked at once."""
WORKSPACE: Final = "/workspace"
AGENT: Final = "agent"
SOLUTION_S: Final = 600.0
"""Time for a solution whose task has no limit."""
_UNTRIED: Final = (*OF_EPISODES, NoEvaluator, SimulatedEvaluator)
_DETAIL_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedTask:
    """Result of one task: the rewards of an untouched sandbox and of the solution (None: not tried), and what is wrong
    with the task, or None."""

    task_id: str
    untouched: float | None = None
    gold: float | None = None
    fault: str | None = None


class ProviderSandboxes:
    """Sandboxes of one evaluation, straight from the provider, without a pool."""

    def __init__(self, provider: LocalProvider, agent: Sandbox) -> None:
        self._provider = provider
        self._agent = agent

    async def freeze(self, sandbox: SandboxId) -> None:
        """Freeze the agent's sandbox, which is the only one that a request names."""
        await self._agent.freeze()

    @asynccontextmanager
    async def clean(self, spec: SandboxSpec) -> AsyncIterator[Sandbox]:
        sandbox = await self._provider.attach(await self._provider.create(spec))
        try:
            yield sandbox
        finally:
            await asyncio.shield(sandbox.kill())

    @asynccontextmanager
    async def live(self, ref: SandboxRef) -> AsyncIterator[Sandbox]:
        yield await self._provider.attach(ref)


async def check_tasks(
    tasks: Sequence[Task], solutions: Solutions, *, progress: Callable[[int, int], None] | None = None
) -> tuple[CheckedTask, ...]:
    """Check tasks, and return their results in order. Raises NamespacesUnavailable where there are no local
    sandboxes."""
    room = asyncio.Semaphore(AT_ONCE)
    done = 0

    async def one(provider: LocalProvider, task: Task) -> CheckedTask:
        nonlocal done
        async with room:
            checked = await check_task(provider, task, solutions)
        done += 1
        if progress is not None:
            progress(done, len(tasks))
        return checked

    async with LocalProvider() as provider, asyncio.TaskGroup() as group:
        running = [group.create_task(one(provider, task)) for task in tasks]
    return tuple(task.result() for task in running)


async def check_task(provider: LocalProvider, task: Task, solutions: Solutions) -> CheckedTask:
    """Check one task. Everything that is wrong with it or with its solution is its fault, and raises nothing."""
    if isinstance(task.evaluator, AnswerEvaluator):
        return check_answer(task, task.evaluator.answer)
    if any(isinstance(spec, _UNTRIED) for spec in task.evaluators):
        return CheckedTask(task_id=task.id)
    checked = CheckedTask(task_id=task.id)
    try:
        untouched = await _verdict_on(provider, task, None)
        checked = replace(checked, untouched=untouched.reward)
        if untouched.reward is None:
            return replace(checked, fault=f"untouched files cannot be graded: {untouched.detail[:_DETAIL_CHARACTERS]}")
        if untouched.solved:
            return replace(checked, fault="untouched files solve it already")
        if (solution := solutions.of(task)) is None:
            return checked
        gold = await _verdict_on(provider, task, solution)
    except (SandboxError, TaskFileError, OSError, ValueError) as error:
        return replace(checked, fault=" ".join(str(error).split())[:_DETAIL_CHARACTERS])
    checked = replace(checked, gold=gold.reward)
    if gold.solved:
        return checked
    return replace(
        checked, fault=f"the solution does not solve it (reward {gold.reward}): {gold.detail[:_DETAIL_CHARACTERS]}"
    )


def check_answer(task: Task, spec: AnswerSpec) -> CheckedTask:
    """Check that each target solves a task of kind answer, and that an empty answer does not."""

    def score(answer: str) -> Verdict:
        said = SpokenPart(source=Author.POLICY, text=f"<{spec.tag}>{answer}</{spec.tag}>")
        return score_answer(spec, EpisodeRecord(parts=(said,)))

    empty, each = score(""), [score(target) for target in spec.targets]
    checked = CheckedTask(task_id=task.id, untouched=empty.reward, gold=min(verdict.reward or 0.0 for verdict in each))
    if empty.solved:
        return replace(checked, fault="an empty answer solves it: a target has only articles and punctuation")
    if not all(verdict.solved for verdict in each):
        return replace(checked, fault=f"a target is not accepted: it contains </{spec.tag}>")
    return checked


async def _verdict_on(provider: LocalProvider, task: Task, solution: Solution | None) -> Verdict:
    """Return the verdict on a prepared sandbox, in which the agent's user has run the solution. Raises SandboxError,
    TaskFileError."""
    evaluator, given = task.evaluator, task.environment.given if task.environment is not None else {}
    verifier = evaluator.verifier if isinstance(evaluator, VerifierEvaluator) else None
    needs_agent = verifier is not None and verifier.live and not verifier.allow_root
    user = str(given.get("user") or (AGENT if needs_agent else "root"))
    folder = str(given.get("workdir") or WORKSPACE)
    if isinstance(evaluator, RepositoryEvaluator):
        folder = evaluator.repository.workdir
    ref = await provider.create(SandboxSpec(image=task.image, **task_resources(task)))
    sandbox = await provider.attach(ref)
    try:
        await prepare(task, sandbox)
        said = ""
        if solution is not None:
            timeout_s = task.limits.agent_s or SOLUTION_S
            said = await _apply(solution, sandbox, user=user, folder=folder, timeout_s=timeout_s)
        request = EvaluationRequest(key=task.id, task_id=task.id, sandbox=ref, agent_user=user)
        score = partial(evaluate, sandboxes=ProviderSandboxes(provider, sandbox))
        verdict = await score_task(task, request, score)
        return replace(verdict, detail=join_details(said, verdict.detail))
    finally:
        await asyncio.shield(sandbox.kill())


async def _apply(solution: Solution, sandbox: Sandbox, *, user: str, folder: str, timeout_s: float) -> str:
    """Run a solution where the agent would have worked, and return what failed; empty if nothing did. A script may fail
    and still solve a task. Raises SandboxError."""
    await sandbox.write_many(solution.files)
    environment = dict(solution.environment)
    ran = await sandbox.exec(solution.command, cwd=folder, env=environment, user=user, timeout_s=timeout_s)
    await sandbox.exec(f"rm -rf {SOLUTION} {HARBOR_FOLDER}", timeout_s=timeout_s)
    if ran.exit_code == 0:
        return ""
    printed = (ran.stdout + ran.stderr)[-_DETAIL_CHARACTERS // 2 :].decode(errors="replace").strip()
    return f"it exited with {ran.exit_code}: {printed}"
