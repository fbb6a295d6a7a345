"""Requests, verdicts and clean sandboxes of evaluations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol, TypeVar

from headrace.actors.services.chat import ChatCall
from headrace.buffer.primitives.critical_path import Segment
from headrace.buffer.tasks.evaluators import FilesEvaluator
from headrace.buffer.tasks.task import Task, TaskId
from headrace.buffer.trajectories.sanitizer import clean_text
from headrace.buffer.trajectories.types import SOLVED_REWARD, Cause, Purpose, check_reward
from headrace.sandboxes.base import FrozenMount, Sandbox, SandboxId, SandboxRef, SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, SandboxError

Collected = TypeVar("Collected")
MAX_DETAIL_CHARACTERS: Final = 500
MAX_LOG_CHARACTERS: Final = 1 << 18
NO_SANDBOX: Final = SandboxRef(provider="none", id=SandboxId(""), endpoint="", secret="")
"""Sandbox of a rollout whose agent needs none."""
LABELS: Final = {"purpose": "evaluate"}
"""Labels of clean sandboxes, which the pool admits ahead of other sandboxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of an evaluation. `reward` is None if and only if `cause` is evaluator or infra. `solved` is independent
    of the reward: it decides between the causes solved and failed, and pass@k counts it. `log` is the output of the
    check or the tests, and `patch` is a diff of the agent's files; both are hostile text and are included only on
    request."""

    reward: float | None
    cause: Cause
    detail: str = ""
    solved: bool = False
    log: str = ""
    patch: str = ""
    parts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Reward and weight of each part of a sum."""
    path: tuple[Segment, ...] = ()
    """The evaluation's time by part (`buffer.breakdown`) without overlaps, in seconds since it began, by the
    evaluator's clock."""
    ended_at_s: float | None = None
    """Unix time of its end; None in virtual time."""


class Author(StrEnum):
    """Author of a part of a conversation."""

    TASK = "task"
    """The task or the environment, before the policy's first answer."""
    POLICY = "policy"
    """The policy."""
    ENVIRONMENT = "environment"
    """The environment, or the recipe's text after a malformed answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenPart:
    """A piece of a conversation with its author, and the tool calls of the policy's answer."""

    source: Author
    text: str
    calls: tuple[ChatCall, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """Record of an episode: what was said, the texts that the environment left, and its verdict if it has one."""

    parts: tuple[SpokenPart, ...] = ()
    artifacts: Mapping[str, str] = field(default_factory=dict)
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """Request to score a rollout: the id of its task, which an evaluator looks up, the agent's sandbox (frozen by the
    evaluator; NO_SANDBOX if it had none), and the record of its episode (None for agents that keep none). If `keep` is
    set, the verdict includes the patch and the log."""

    key: str
    task_id: TaskId
    purpose: Purpose = Purpose.TRAIN
    part: str = ""
    """Name of the only part to score of a sum."""
    sandbox: SandboxRef
    episode: EpisodeRecord | None = None
    traceparent: str = ""
    keep: bool = False
    agent_user: str = "root"
    """User that ran the policy's commands."""


class EvaluatorFault(Exception):
    """The evaluator returned an invalid verdict, which is never the agent's fault."""


class ProgramFailed(SandboxError):
    """A program of ours has failed on what the agent left."""


class PatchRefused(Exception):
    """The agent's files do not form a valid patch: they exceed a cap, or only they break the program that collects
    it."""


async def collect_twice(collect: Callable[[bool], Awaitable[Collected]]) -> Collected:
    """Return the result of `collect(False)`, for the agent's files. If it fails, `collect(True)` runs the same program
    on the untouched files: only a program that works there and fails again on the agent's files was broken by them.
    Raises PatchRefused, ProgramFailed (also for the untouched files), SandboxError."""
    with suppress(ProgramFailed, ExecTimeout):
        return await collect(False)
    try:
        await collect(True)
    except ExecTimeout as error:
        raise ProgramFailed(f"collecting the untouched files exceeded {error}") from error
    try:
        return await collect(False)
    except (ProgramFailed, ExecTimeout) as error:
        raise PatchRefused(f"only the agent's files break the collection of the patch: {error}") from error


class CleanSandboxes(Protocol):
    """Interface that freezes the agent's sandbox and leases clean ones, which are released when their context exits."""

    async def freeze(self, sandbox: SandboxId) -> None: ...

    def clean(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]: ...


def task_resources(task: Task) -> dict[str, Any]:
    """Return the limits of a task's sandboxes as fields of a SandboxSpec; None means the provider's default."""
    limits = task.limits
    return {
        "cpu": limits.cpus,
        "memory_bytes": limits.memory_mb and limits.memory_mb << 20,
        "disk_bytes": limits.disk_mb and limits.disk_mb << 20,
    }


def clean_spec(task: Task, mounts: tuple[FrozenMount, ...] = ()) -> SandboxSpec:
    """Return the specification of a clean sandbox for an evaluation of a task."""
    return SandboxSpec(image=task.image, mounts=mounts, labels=LABELS, **task_resources(task))


def spec_with_data(task: Task, request: EvaluationRequest) -> SandboxSpec:
    """Return the specification of a clean sandbox with the data paths of the agent's frozen one."""
    spec = task.evaluator
    paths = spec.data_paths if isinstance(spec, FilesEvaluator) else ()
    return clean_spec(task, tuple(FrozenMount(source=request.sandbox.id, path=path, target=path) for path in paths))


class AgentSandboxes(CleanSandboxes, Protocol):
    """The same, with access to the agent's own sandbox."""

    def live(self, ref: SandboxRef) -> AbstractAsyncContextManager[Sandbox]:
        """Attach to the agent's sandbox, which is not frozen and belongs to the rollout."""


def solved(detail: str = "") -> Verdict:
    return Verdict(reward=1.0, solved=True, cause=Cause.SOLVED, detail=detail)


def failed(detail: str) -> Verdict:
    return Verdict(reward=0.0, cause=Cause.FAILED, detail=detail)


def rewarded(reward: object, *, solved: bool | None, detail: str = "") -> Verdict:
    """Return a verdict with an evaluator's reward; if `solved` is None, SOLVED_REWARD decides. Raises
    EvaluatorFault."""
    try:
        number = check_reward(reward)
    except ValueError as error:
        raise EvaluatorFault(f"evaluator error: {error}") from error
    solved = number >= SOLVED_REWARD if solved is None else solved
    return Verdict(reward=number, solved=solved, cause=Cause.SOLVED if solved else Cause.FAILED, detail=detail)


def rewarded_by(answer: Mapping[str, object]) -> Verdict:
    """Return the verdict of an answer with `reward`, and perhaps `solved` and `detail`. Raises EvaluatorFault."""
    if not {"reward"} <= answer.keys() <= {"reward", "solved", "detail"}:
        raise EvaluatorFault(f"returned the keys {sorted(answer)} instead of reward, solved and detail")
    solved, detail = answer.get("solved"), answer.get("detail", "")
    if not isinstance(solved, bool | None) or not isinstance(detail, str):
        raise EvaluatorFault("returned a `solved` that is no boolean, or a `detail` that is no text")
    return rewarded(answer["reward"], solved=solved, detail=clean_text(detail[:MAX_DETAIL_CHARACTERS]))


def invalid(detail: str) -> Verdict:
    return Verdict(reward=0.0, cause=Cause.INVALID, detail=detail)


def broken(detail: str) -> Verdict:
    """Return the verdict for a broken check; `evaluation` determines who broke it."""
    return Verdict(reward=None, cause=Cause.EVALUATOR, detail=detail)


def printed(*outputs: bytes | str) -> str:
    """Join a check's outputs, keeping only the last MAX_LOG_CHARACTERS characters."""
    texts = [output if isinstance(output, str) else output.decode(errors="replace") for output in outputs]
    return "\n".join(text for text in texts if text)[-MAX_LOG_CHARACTERS:]


def join_details(*sentences: str) -> str:
    """Join a verdict detail's nonempty sentences."""
    return "; ".join(sentence for sentence in sentences if sentence)
