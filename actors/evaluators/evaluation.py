"""Scoring what a dead agent left behind.

Invariants:
- The agent's sandbox is frozen before anything is looked at; nothing of it runs again.
- A check runs in a clean sandbox that holds the declared data paths and nothing else of the agent's: its shell files,
  preloads, PATH entries and processes do not exist there.
- Exit code 0 of a check is reward 1, exit code 1 is reward 0; anything else says that the check broke. (Kinds compare
  and repository: a comparison outside the sandbox and a report by test id decide, never an exit code.)
- Nobody escapes a 0 by breaking the check: one that breaks twice on what the agent left, and not on the task's own
  untouched files, was broken by the agent, and that is reward 0. One that breaks on those too is no evaluator.
- Hidden files arrive after the agent is dead, in a sandbox it never saw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.actors.evaluators.collecting import LeftDiff
from headrace.actors.evaluators.comparison import compare
from headrace.actors.evaluators.diff_filter import Dropped, summary
from headrace.actors.evaluators.patch import Patch, PatchRefused, collect_patch
from headrace.actors.evaluators.repository import grade, score_repository
from headrace.actors.evaluators.verdict import (
    LABELS,
    MAX_DETAIL_CHARACTERS,
    CleanRooms,
    EvaluationRequest,
    Verdict,
    broken,
    failed,
    invalid,
    solved,
    told,
)
from headrace.buffer.tasks import EvaluatorKind
from headrace.buffer.types import Cause
from headrace.sandboxes.base import FrozenMount, SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, FrozenPathRefused, SandboxError, SandboxFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox

__all__ = ["CleanRooms", "EvaluationRequest", "Verdict", "evaluate"]

PYTHON = "/usr/bin/python3 -I -S"
"""Isolated: no environment variables, no user site, no site customisation."""


async def evaluate(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    """Score one rollout. Errors of sandboxes become verdicts of cause infra; only programming errors are raised."""
    try:
        await rooms.freeze(request.sandbox.id)
        verdict = await _score(request, rooms)
        return await _blame(request, rooms, verdict) if verdict.cause is Cause.EVALUATOR else verdict
    except FrozenPathRefused as error:
        return failed(f"a data path is gone or of another kind: {error}")
    except SandboxError as error:
        return Verdict(reward=None, cause=Cause.INFRA, detail=f"{type(error).__name__}: {error}")


async def _blame(request: EvaluationRequest, rooms: CleanRooms, first: Verdict) -> Verdict:
    """Who broke the check: the evaluator, which breaks on untouched files too, chance, or the agent. Raises
    SandboxError."""
    if (await _score_untouched(request.task, rooms)).cause is Cause.EVALUATOR:
        return first
    again = await _score(request, rooms)
    if again.cause is not Cause.EVALUATOR:
        return again
    return invalid(f"only what the agent left breaks the check: {again.detail}")


async def _score(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    """One look at what the agent left; a check that breaks is cause evaluator. Raises SandboxError."""
    match request.task.evaluator.kind:
        case EvaluatorKind.REPOSITORY:
            return await score_repository(request, rooms)
        case EvaluatorKind.PATCH | EvaluatorKind.COMPARE:
            return await _score_patch(request, rooms)
        case _:
            return await _check_files(request.task, {}, _spec_with_data(request), rooms)


async def _score_untouched(task: Task, rooms: CleanRooms) -> Verdict:
    """The same look at what the task put there itself. Raises SandboxError."""
    if task.evaluator.kind is EvaluatorKind.REPOSITORY:
        return await grade(task, LeftDiff(), rooms)
    files = Patch(changes={}).applied_to(task)
    return await _check_files(task, files, SandboxSpec(image=task.image, labels=LABELS), rooms)


async def _score_patch(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    try:
        async with rooms.clean(_spec_with_data(request)) as room:
            patch = await collect_patch(request.task, room)
    except PatchRefused as error:
        return invalid(str(error))
    except ExecTimeout as error:
        return broken(f"collecting the patch outlived {error}")
    dropped: tuple[Dropped, ...] = ()
    if request.task.evaluator.kind is EvaluatorKind.COMPARE:
        patch, dropped = patch.filtered(request.task)
    spec = SandboxSpec(image=request.task.image, labels=LABELS)
    verdict = await _check_files(request.task, patch.applied_to(request.task), spec, rooms)
    return Verdict(reward=verdict.reward, cause=verdict.cause, detail=told(verdict.detail, summary(dropped)))


async def _check_files(task: Task, files: Mapping[str, bytes], spec: SandboxSpec, rooms: CleanRooms) -> Verdict:
    """The check in a clean sandbox with these files. Raises SandboxError."""
    async with rooms.clean(spec) as room:
        try:
            if files:
                await room.write_many(files)
            return await run_check(task, room)
        except ExecTimeout as error:
            return broken(f"the check outlived {error}")
        except SandboxFileError as error:
            return broken(f"the files could not be written: {error}")


def _spec_with_data(request: EvaluationRequest) -> SandboxSpec:
    mounts = tuple(
        FrozenMount(source=request.sandbox.id, path=path, target=path) for path in request.task.evaluator.data_paths
    )
    return SandboxSpec(image=request.task.image, mounts=mounts, labels=LABELS)


async def run_check(task: Task, room: Sandbox) -> Verdict:
    """Run the task's check, given on standard input so that no file of it lies anywhere. Raises ExecTimeout,
    SandboxGone."""
    spec = task.evaluator
    if spec.kind is EvaluatorKind.COMPARE:
        return await compare(room, spec.check, spec.expected, python=f"{PYTHON} -B", timeout_s=spec.timeout_s)
    result = await room.exec(f"{PYTHON} -", stdin=spec.check.encode(), cwd="/", timeout_s=spec.timeout_s)
    detail = (result.stdout + result.stderr).decode(errors="replace")[-MAX_DETAIL_CHARACTERS:]
    if result.exit_code == 0:
        return solved()
    if result.exit_code == 1 and b"Traceback" not in result.stderr:
        return failed(detail)
    return broken(f"check ended with {result.exit_code}: {detail}")
