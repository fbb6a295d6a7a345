"""What an evaluation gets and gives, and the clean sandboxes it works in."""

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
"""Of every clean sandbox: the pool admits them before others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What to score: the agent's sandbox (frozen by the evaluator) and the task it worked on. `keep`: the verdict
    tells what the agent left and what the evaluation printed."""

    key: str
    task: Task
    sandbox: SandboxRef
    traceparent: str = ""
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`reward` is None exactly when `cause` is evaluator or infra. `solved` says whether the task is solved, whatever
    the reward: it decides between the causes solved and failed, and pass@k counts it. `log` is what the check or the
    tests printed, `patch` a diff of what the agent left: hostile text, told only to those who asked to keep it."""

    reward: float | None
    cause: Cause
    detail: str = ""
    solved: bool = False
    log: str = ""
    patch: str = ""


class EvaluatorFault(Exception):
    """The evaluator gave what cannot be a verdict. That is never the agent's doing: the message says what it gave."""


class CleanSandboxes(Protocol):
    """Freezes the agent's sandbox and lends clean ones; leaving their context releases them."""

    async def freeze(self, sandbox: SandboxId) -> None: ...

    def clean(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]: ...


def solved(detail: str = "") -> Verdict:
    return Verdict(reward=1.0, solved=True, cause=Cause.SOLVED, detail=detail)


def failed(detail: str) -> Verdict:
    return Verdict(reward=0.0, cause=Cause.FAILED, detail=detail)


def rewarded(reward: object, *, solved: bool | None, detail: str = "") -> Verdict:
    """A verdict with a reward of the evaluator's own; without its word, SOLVED_REWARD decides. Raises
    EvaluatorFault."""
    try:
        number = check_reward(reward)
    except ValueError as error:
        raise EvaluatorFault(f"the evaluator is at fault: {error}") from error
    solved = number >= SOLVED_REWARD if solved is None else solved
    return Verdict(reward=number, solved=solved, cause=Cause.SOLVED if solved else Cause.FAILED, detail=detail)


def invalid(detail: str) -> Verdict:
    return Verdict(reward=0.0, cause=Cause.INVALID, detail=detail)


def broken(detail: str) -> Verdict:
    """Nothing was decided: somebody broke the check, and `evaluation` finds out who."""
    return Verdict(reward=None, cause=Cause.EVALUATOR, detail=detail)


def printed(*outputs: bytes | str) -> str:
    """The ends of what a check printed, together at most MAX_LOG_CHARACTERS."""
    texts = [output if isinstance(output, str) else output.decode(errors="replace") for output in outputs]
    return "\n".join(text for text in texts if text)[-MAX_LOG_CHARACTERS:]


def told(*sentences: str) -> str:
    """One detail of several sentences; empty ones are left out."""
    return "; ".join(sentence for sentence in sentences if sentence)
