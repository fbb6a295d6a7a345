"""Scoring what a dead agent left behind.

Invariants:
- The agent's sandbox is frozen before anything is looked at; nothing of it runs again.
- A check runs in a clean sandbox that holds the declared data paths and nothing else of the agent's: its shell files,
  preloads, PATH entries and processes do not exist there.
- Exit code 0 of a check is reward 1, exit code 1 is reward 0, unless the check binds a reward of its own; anything else
  says that the check broke. (Kinds compare and repository: a comparison outside the sandbox and a report by test id
  decide, never an exit code.)
- A reward that is not a number within the bound is the evaluator's fault, on whatever files.
- Nobody escapes a 0 by breaking the check: one that breaks twice on what the agent left, and not on the task's own
  untouched files, was broken by the agent, and that is reward 0. One that breaks on those too is no evaluator.
- Hidden files arrive after the agent is dead, in a sandbox it never saw.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from headrace.actors.evaluation.baselines import Baselines
from headrace.actors.evaluation.comparison import compare, last_answer
from headrace.actors.evaluation.diff_filter import Dropped, summary
from headrace.actors.evaluation.patch import Patch, PatchRefused, collect_patch
from headrace.actors.evaluation.patch_collection import LeftDiff
from headrace.actors.evaluation.plugins import score_by_plugin
from headrace.actors.evaluation.repository import grade, score_repository
from headrace.actors.evaluation.verdict import (
    LABELS,
    MAX_DETAIL_CHARACTERS,
    CleanSandboxes,
    EvaluationRequest,
    EvaluatorFault,
    Verdict,
    broken,
    failed,
    invalid,
    printed,
    rewarded,
    solved,
    told,
)
from headrace.actors.in_sandbox import check as check_program
from headrace.actors.in_sandbox import program_command, source
from headrace.buffer.sanitizer import clean_text
from headrace.buffer.tasks import PYTHON, EvaluatorKind
from headrace.buffer.types import Cause
from headrace.sandboxes.base import FrozenMount, ProgramRunner, SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, FrozenPathRefused, SandboxError, SandboxFileError
from headrace.sandboxes.launcher.commands import PRELOADED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.buffer.tasks import EvaluatorSpec, Task
    from headrace.sandboxes.base import ExecResult, Sandbox

__all__ = ["CleanSandboxes", "EvaluationRequest", "Verdict", "evaluate"]


async def evaluate(request: EvaluationRequest, rooms: CleanSandboxes, baselines: Baselines | None = None) -> Verdict:
    """Score one rollout. `baselines` keeps what is known of untouched repositories from one call to the next. Errors of
    sandboxes become verdicts of cause infra; only programming errors are raised."""
    baselines = baselines or Baselines()
    try:
        await rooms.freeze(request.sandbox.id)
        verdict = await _score(request, rooms, baselines)
        if verdict.cause is Cause.EVALUATOR:
            verdict = await _blame(request, rooms, baselines, verdict)
        # What a check prints reaches ledger, spans and JSON, which take no lone surrogate.
        return await _kept(request, rooms, replace(verdict, detail=clean_text(verdict.detail)))
    except FrozenPathRefused as error:
        return failed(f"a data path is gone or of another kind: {error}")
    except EvaluatorFault as error:
        return broken(str(error))
    except SandboxError as error:
        return Verdict(reward=None, cause=Cause.INFRA, detail=f"{type(error).__name__}: {error}")


async def _kept(request: EvaluationRequest, rooms: CleanSandboxes, verdict: Verdict) -> Verdict:
    """The verdict with log and patch for those who keep them, without for all others. The patch of a task that is
    scored by its state is collected for this alone, and what goes wrong with that changes no verdict."""
    if not request.keep:
        return replace(verdict, log="", patch="")
    if request.task.evaluator.kind is not EvaluatorKind.STATE:
        return verdict
    try:
        async with rooms.clean(_spec_with_data(request)) as room:
            patch = await collect_patch(request.task, room)
    except (PatchRefused, SandboxError) as error:
        return replace(verdict, log=printed(verdict.log, f"what the agent left is no patch: {error}"))
    return replace(verdict, patch=patch.as_diff(request.task))


async def _blame(request: EvaluationRequest, rooms: CleanSandboxes, baselines: Baselines, first: Verdict) -> Verdict:
    """Who broke the check: the evaluator, which breaks on untouched files too, chance, or the agent. Raises
    SandboxError."""
    if (await _score_untouched(request.task, rooms, baselines)).cause is Cause.EVALUATOR:
        return first
    again = await _score(request, rooms, baselines)
    if again.cause is not Cause.EVALUATOR:
        return again
    blamed = invalid(f"only what the agent left breaks the check: {again.detail}")
    return replace(blamed, log=again.log, patch=again.patch)


async def _score(request: EvaluationRequest, rooms: CleanSandboxes, baselines: Baselines) -> Verdict:
    """One look at what the agent left; a check that breaks is cause evaluator. Raises SandboxError, EvaluatorFault."""
    match request.task.evaluator.kind:
        case EvaluatorKind.REPOSITORY:
            return await score_repository(request, rooms, baselines)
        case EvaluatorKind.PATCH | EvaluatorKind.COMPARE:
            return await _score_patch(request, rooms)
        case EvaluatorKind.PLUGIN:
            return await score_by_plugin(request, rooms)
        case _:
            return await _check_files(request.task, _hidden_files(request.task), _spec_with_data(request), rooms)


async def _score_untouched(task: Task, rooms: CleanSandboxes, baselines: Baselines) -> Verdict:
    """The same look at what the task put there itself. Raises SandboxError, EvaluatorFault."""
    if task.evaluator.kind is EvaluatorKind.REPOSITORY:
        return await grade(task, LeftDiff(), rooms, baselines, always_twins=True)
    if task.evaluator.kind is EvaluatorKind.PLUGIN:
        return broken("only what an agent left can be shown to an evaluator of another package")
    files = Patch(changes={}).applied_to(task)
    return await _check_files(task, files, SandboxSpec(image=task.image, labels=LABELS), rooms)


async def _score_patch(request: EvaluationRequest, rooms: CleanSandboxes) -> Verdict:
    try:
        async with rooms.clean(_spec_with_data(request)) as room:
            patch = await collect_patch(request.task, room)
    except PatchRefused as error:
        return invalid(str(error))
    except ExecTimeout as error:
        return broken(f"collecting the patch outlived {error}")
    dropped: tuple[Dropped, ...] = ()
    left = patch
    if request.task.evaluator.kind is EvaluatorKind.COMPARE:
        patch, dropped = patch.filtered(request.task)
    spec = SandboxSpec(image=request.task.image, labels=LABELS)
    verdict = await _check_files(request.task, patch.applied_to(request.task), spec, rooms)
    diff = left.as_diff(request.task) if request.keep else ""
    return replace(verdict, detail=told(verdict.detail, summary(dropped)), patch=diff)


async def _check_files(task: Task, files: Mapping[str, bytes], spec: SandboxSpec, rooms: CleanSandboxes) -> Verdict:
    """The check in a clean sandbox with these files. Raises SandboxError, EvaluatorFault."""
    async with rooms.clean(spec) as room:
        try:
            if files:
                await room.write_many(files)
            return await run_check(task, room)
        except ExecTimeout as error:
            return broken(f"the check outlived {error}")
        except SandboxFileError as error:
            return broken(f"the files could not be written: {error}")


def _hidden_files(task: Task) -> dict[str, bytes]:
    return {path: text.encode() for path, text in task.evaluator.hidden_files.items()}


def _spec_with_data(request: EvaluationRequest) -> SandboxSpec:
    mounts = tuple(
        FrozenMount(source=request.sandbox.id, path=path, target=path) for path in request.task.evaluator.data_paths
    )
    return SandboxSpec(image=request.task.image, mounts=mounts, labels=LABELS)


async def run_check(task: Task, room: Sandbox) -> Verdict:
    """Run the task's check, given on standard input so that no file of it lies anywhere. Raises ExecTimeout,
    SandboxGone, EvaluatorFault."""
    spec = task.evaluator
    if spec.kind is EvaluatorKind.COMPARE:
        return await compare(room, spec.check, spec.expected, python=spec.python, timeout_s=spec.timeout_s)
    result = None
    if spec.python == PYTHON and isinstance(room, ProgramRunner) and imports_only(spec.check, PRELOADED):
        result = await _run_plainly(spec, room)
    if result is None or result.exit_code == check_program.UNAVAILABLE:
        result = await room.exec(
            program_command(spec.python, "check", check_program.PACKAGES, *spec.data_paths),
            stdin=spec.check.encode(),
            cwd="/",
            timeout_s=spec.timeout_s,
        )
    return replace(_verdict(result), log=printed(result.stderr))


async def _run_plainly(spec: EvaluatorSpec, room: ProgramRunner) -> ExecResult:
    """A check that needs nothing of the image needs no interpreter of it either: to start one costs more than the
    check."""
    arguments = (check_program.PLAIN, *spec.data_paths)
    return await room.run_program(source("check"), arguments, stdin=spec.check.encode(), timeout_s=spec.timeout_s)


@lru_cache(maxsize=1024)
def imports_only(check: str, modules: frozenset[str]) -> bool:
    """Whether all that a check imports, as far as its text tells, is among `modules`."""
    try:
        nodes = list(ast.walk(ast.parse(check)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    imported = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    imported |= {"." * node.level + (node.module or "") for node in nodes if isinstance(node, ast.ImportFrom)}
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    return imported <= modules and not named & {"__import__", "__builtins__", "__loader__"}


def _verdict(result: ExecResult) -> Verdict:
    """By the exit code and the report of `in_sandbox.check`. Raises EvaluatorFault."""
    detail = result.stderr.decode(errors="replace")[-MAX_DETAIL_CHARACTERS:]
    if not result.stdout.startswith(check_program.BEGUN):
        return broken(f"the check was not begun ({result.exit_code}): {detail}")
    match result.exit_code:
        case 0:
            return solved()
        case 1:
            return failed(detail)
        case check_program.REPORTED if (answer := last_answer(result.stdout)) is not None:
            if "reward" not in answer:
                raise EvaluatorFault(f"the evaluator is at fault: the reward is not a number: {answer.get('error')}")
            verdict = rewarded(answer["reward"], solved=answer.get("solved"))
            return verdict if verdict.solved else replace(verdict, detail=detail)
        case check_program.RAISED:
            return broken(f"the check raised an exception: {detail}")
        case code:
            return broken(f"the check ended with {code}: {detail}")
