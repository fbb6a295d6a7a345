"""What an evaluation gets and gives, and the clean sandboxes it works in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from headrace.buffer.types import Cause

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox, SandboxId, SandboxRef, SandboxSpec

MAX_DETAIL_CHARACTERS: Final = 500
LABELS: Final = {"purpose": "evaluate"}
"""Of every clean sandbox: the pool admits them before others."""


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


def solved(detail: str = "") -> Verdict:
    return Verdict(reward=1.0, cause=Cause.SOLVED, detail=detail)


def failed(detail: str) -> Verdict:
    return Verdict(reward=0.0, cause=Cause.FAILED, detail=detail)


def invalid(detail: str) -> Verdict:
    return Verdict(reward=0.0, cause=Cause.INVALID, detail=detail)


def broken(detail: str) -> Verdict:
    """Nothing was decided: somebody broke the check, and `evaluation` finds out who."""
    return Verdict(reward=None, cause=Cause.EVALUATOR, detail=detail)


def told(*sentences: str) -> str:
    """One detail of several sentences; empty ones are left out."""
    return "; ".join(sentence for sentence in sentences if sentence)
