"""Requests, verdicts and clean sandboxes of evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from headrace.buffer.types import SOLVED_REWARD, Cause, check_reward

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from headrace.buffer.tasks import Task
    from headrace.sandboxes.base import Sandbox, SandboxId, SandboxRef, SandboxSpec

MAX_DETAIL_CHARACTERS: Final = 500
MAX_LOG_CHARACTERS: Final = 1 << 18
LABELS: Final = {"purpose": "evaluate"}
"""Labels of clean sandboxes, which the pool admits before others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Request to score a rollout: the sandbox of the agent (frozen by the evaluator) and its task. `keep`: include
    patch and log in the verdict."""

    key: str
    task: Task
    sandbox: SandboxRef
    traceparent: str = ""
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of an evaluation. `reward` is None exactly if `cause` is evaluator or infra. `solved` is independent of
    the reward: it decides between the causes solved and failed, and pass@k counts it. `log` is the output of the check
    or the tests, `patch` a diff of the files of the agent: hostile text, only included on request."""

    reward: float | None
    cause: Cause
    detail: str = ""
    solved: bool = False
    log: str = ""
    patch: str = ""


class EvaluatorFault(Exception):
    """The evaluator returned an invalid verdict, which is never the fault of the agent."""


class CleanSandboxes(Protocol):
    """Freezes the sandbox of the agent and leases clean ones, which are released when their context ends."""

    async def freeze(self, sandbox: SandboxId) -> None: ...

    def clean(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]: ...


def solved(detail: str = "") -> Verdict:
    return Verdict(reward=1.0, solved=True, cause=Cause.SOLVED, detail=detail)


def failed(detail: str) -> Verdict:
    return Verdict(reward=0.0, cause=Cause.FAILED, detail=detail)


def rewarded(reward: object, *, solved: bool | None, detail: str = "") -> Verdict:
    """Return a verdict with the reward of an evaluator; if `solved` is None, SOLVED_REWARD decides. Raises
    EvaluatorFault."""
    try:
        number = check_reward(reward)
    except ValueError as error:
        raise EvaluatorFault(f"evaluator error: {error}") from error
    solved = number >= SOLVED_REWARD if solved is None else solved
    return Verdict(reward=number, solved=solved, cause=Cause.SOLVED if solved else Cause.FAILED, detail=detail)


def invalid(detail: str) -> Verdict:
    return Verdict(reward=0.0, cause=Cause.INVALID, detail=detail)


def broken(detail: str) -> Verdict:
    """Return a verdict of a broken check; `evaluation` determines who broke it."""
    return Verdict(reward=None, cause=Cause.EVALUATOR, detail=detail)


def printed(*outputs: bytes | str) -> str:
    """Join the outputs of a check, and keep the last MAX_LOG_CHARACTERS."""
    texts = [output if isinstance(output, str) else output.decode(errors="replace") for output in outputs]
    return "\n".join(text for text in texts if text)[-MAX_LOG_CHARACTERS:]


def join_details(*sentences: str) -> str:
    """Join the nonempty sentences of a detail."""
    return "; ".join(sentence for sentence in sentences if sentence)
