"""Scoring what a dead agent left behind.

Invariants:
- The agent's sandbox is frozen before anything is looked at; nothing of it runs again.
- A check runs in a clean sandbox that holds the declared data paths and nothing else of the agent's: its shell files,
  preloads,
  PATH entries and processes do not exist there.
- Exit code 0 of a check is reward 1, exit code 1 is reward 0; anything else says that the evaluator broke, never a
  reward.
- Hidden files arrive after the agent is dead, in a sandbox it never saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from headrace.buffer.tasks import EvaluatorKind
from headrace.buffer.types import Cause
from headrace.sandboxes.base import FrozenMount, SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, FrozenPathRefused, SandboxError

if TYPE_CHECKING:
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
        if request.task.evaluator.kind is EvaluatorKind.PATCH:
            return await _evaluate_patch(request, rooms)
        return await _evaluate_state(request, rooms)
    except FrozenPathRefused as error:
        return Verdict(reward=0.0, cause=Cause.FAILED, detail=f"a data path is gone or no folder any more: {error}")
    except ExecTimeout as error:
        return Verdict(reward=None, cause=Cause.EVALUATOR, detail=f"the check outlived {error}")
    except SandboxError as error:
        return Verdict(reward=None, cause=Cause.INFRA, detail=f"{type(error).__name__}: {error}")


async def _evaluate_state(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    async with rooms.clean(_spec_with_data(request)) as room:
        return await run_check(request.task, room)


async def _evaluate_patch(request: EvaluationRequest, rooms: CleanRooms) -> Verdict:
    from headrace.actors.evaluators.patch import PatchRefused, collect_patch

    try:
        async with rooms.clean(_spec_with_data(request)) as room:
            patch = await collect_patch(request.task, room)
    except PatchRefused as error:
        return Verdict(reward=0.0, cause=Cause.INVALID, detail=str(error))
    async with rooms.clean(SandboxSpec(image=request.task.image, labels={"purpose": "evaluate"})) as room:
        await room.write_many(patch.applied_to(request.task))
        return await run_check(request.task, room)


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
    return Verdict(reward=None, cause=Cause.EVALUATOR, detail=f"check ended with {result.exit_code}: {detail}")
