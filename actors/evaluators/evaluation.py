"""Scoring what a dead agent left behind.

Invariants:
- The agent's sandbox is frozen before anything is looked at; nothing of it runs again.
- A check runs in a clean sandbox that holds the declared data paths and nothing else of the agent's: its shell files,
  preloads, PATH entries and processes do not exist there.
- Exit code 0 of a check is reward 1, exit code 1 is reward 0; anything else says that the check broke.
- Nobody escapes a 0 by breaking the check: one that breaks twice on what the agent left, and not on the task's own
  untouched files, was broken by the agent, and that is reward 0. One that breaks on those too is no evaluator.
- Hidden files arrive after the agent is dead, in a sandbox it never saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace.actors.evaluators.patch import Patch, PatchRefused, collect_patch
from headrace.buffer.tasks import EvaluatorKind
from headrace.buffer.types import Cause
from headrace.sandboxes.base import FrozenMount, SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, FrozenPathRefused, SandboxError, SandboxFileError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox, SandboxId, SandboxRef

MAX_DETAIL_CHARACTERS = 500
PYTHON = "/usr/bin/python3 -I -S"
"""Isolated: no environment variables, no user site, no site customisation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to score: the agent's sandbox (frozen by the evaluator) and the task it worked on."""

    key: str
    task: Task
    sandbox: SandboxRef
    traceparent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`reward` is None exactly when `cause` is evaluator or infra."""

    reward: float | None
    cause: Cause
    detail: str = ""


class CleanRooms(Protocol):
    """Freezes the agent's sandbox and lends clean ones; leaving their context releases them."""

    async def freeze(self, sandbox: SandboxId) -> None: ...

    def clean(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]: ...


async def evaluate(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    """Score one rollout. Errors of sandboxes become verdicts of cause infra; only programming errors are raised."""
    try:
        await rooms.freeze(request.sandbox.id)
        verdict = await _score(request, rooms)
        return await _blame(request, rooms, verdict) if verdict.cause is Cause.EVALUATOR else verdict
    except FrozenPathRefused as error:
        return Verdict(reward=0.0, cause=Cause.FAILED, detail=f"a data path is gone or of another kind: {error}")
    except SandboxError as error:
        return Verdict(reward=None, cause=Cause.INFRA, detail=f"{type(error).__name__}: {error}")


async def _blame(request: EvaluationRequest, rooms: CleanRooms, broken: Verdict) -> Verdict:
    """Who broke the check: the evaluator, which breaks on untouched files too, chance, or the agent. Raises
    SandboxError."""
    spec = SandboxSpec(image=request.task.image, labels={"purpose": "evaluate"})
    untouched = await _check_files(request.task, Patch(changes={}).applied_to(request.task), spec, rooms)
    if untouched.cause is Cause.EVALUATOR:
        return broken
    again = await _score(request, rooms)
    if again.cause is not Cause.EVALUATOR:
        return again
    return Verdict(reward=0.0, cause=Cause.INVALID, detail=f"only what the agent left breaks the check: {again.detail}")


async def _score(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    """One look at what the agent left; a check that breaks is cause evaluator. Raises SandboxError."""
    if request.task.evaluator.kind is EvaluatorKind.PATCH:
        return await _score_patch(request, rooms)
    return await _check_files(request.task, {}, _spec_with_data(request), rooms)


async def _score_patch(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    try:
        async with rooms.clean(_spec_with_data(request)) as room:
            patch = await collect_patch(request.task, room)
    except PatchRefused as error:
        return Verdict(reward=0.0, cause=Cause.INVALID, detail=str(error))
    except ExecTimeout as error:
        return _broken(f"collecting the patch outlived {error}")
    spec = SandboxSpec(image=request.task.image, labels={"purpose": "evaluate"})
    return await _check_files(request.task, patch.applied_to(request.task), spec, rooms)


async def _check_files(task: Task, files: Mapping[str, bytes], spec: SandboxSpec, rooms: CleanRooms) -> Verdict:
    """The check in a clean sandbox with these files. Raises SandboxError."""
    async with rooms.clean(spec) as room:
        try:
            if files:
                await room.write_many(files)
            return await run_check(task, room)
        except ExecTimeout as error:
            return _broken(f"the check outlived {error}")
        except SandboxFileError as error:
            return _broken(f"the files could not be written: {error}")


def _broken(detail: str) -> Verdict:
    return Verdict(reward=None, cause=Cause.EVALUATOR, detail=detail)


def _spec_with_data(request: EvaluationRequest) -> SandboxSpec:
    mounts = tuple(
        FrozenMount(source=request.sandbox.id, path=path, target=path) for path in request.task.evaluator.data_paths
    )
    return SandboxSpec(image=request.task.image, mounts=mounts, labels={"purpose": "evaluate"})


async def run_check(task: Task, room: Sandbox) -> Verdict:
    """Run the task's check, given on standard input so that no file of it lies anywhere. Raises ExecTimeout,
    SandboxGone."""
    spec = task.evaluator
    result = await room.exec(f"{PYTHON} -", stdin=spec.check.encode(), cwd="/", timeout_s=spec.timeout_s)
    detail = (result.stdout + result.stderr).decode(errors="replace")[-MAX_DETAIL_CHARACTERS:]
    if result.exit_code == 0:
        return Verdict(reward=1.0, cause=Cause.SOLVED)
    if result.exit_code == 1 and b"Traceback" not in result.stderr:
        return Verdict(reward=0.0, cause=Cause.FAILED, detail=detail)
    return _broken(f"check ended with {result.exit_code}: {detail}")
