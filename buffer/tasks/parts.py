"""Optional parts of a task: messages, environment, limits, judge, origin, and files that are not text.

Invariants:
- The secret of an environment never reaches an agent: `secret_in_prompt` finds a task whose prompt contains it.
- A binary file is stored by reference: its bytes are read when a sandbox is prepared, and must still have the digest
  that the task names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from headrace.buffer.errors import TaskFileError
from headrace.buffer.primitives.sections import StrictRecord

SECRET_CHARACTERS: Final = 24
"""Length from which a text of a secret is looked for in the prompt. Shorter ones, such as names or "ordered by
mistake", occur in prompts by chance."""


MAX_REWARD: Final = 1e6
"""Bound on a reward's absolute value. The ledger sums squares of rewards, which must stay exact enough to be
recomputed. A larger reward is a bug in the evaluator, for example an overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMessage(StrictRecord):
    """A message that opens the conversation, in place of the instruction."""

    role: Literal["system", "user"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec(StrictRecord):
    """The environment of a task. `given` may be shown to the agent. `secret` (hidden goals, the instruction of a
    simulated user) reaches only the environment. Both are JSON objects whose meaning the kind defines."""

    kind: str
    given: Mapping[str, Any] = field(default_factory=dict)
    secret: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLimits(StrictRecord):
    """Limits of a task's rollouts; None leaves the recipe's. A task can only lower the recipe's limits of clocks, turns
    and tokens. `cpus`, `memory_mb` and `disk_mb` replace the provider's defaults for the agent's sandbox and for those
    of its evaluator."""

    agent_s: float | None = None
    """Deadline of the agent, in seconds."""
    command_s: float | None = None
    """Deadline of one command, in seconds."""
    evaluate_s: float | None = None
    """Deadline of the evaluation, in seconds."""
    turns: int | None = None
    """Maximum number of answers."""
    turn_tokens: int | None = None
    """Maximum number of tokens in one answer."""
    context_tokens: int | None = None
    """Maximum number of tokens in one conversation."""
    sampled_tokens: int | None = None
    """Maximum number of tokens sampled in one rollout."""
    cpus: float | None = None
    """Number of CPUs."""
    memory_mb: int | None = None
    """Memory in MiB."""
    disk_mb: int | None = None
    """Disk space in MiB."""

    def items(self) -> Iterator[tuple[str, float]]:
        """Yield the names and values of the limits that are set."""
        for limit in fields(self):
            if (value := getattr(self, limit.name)) is not None:
                yield limit.name, value


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeSpec(StrictRecord):
    """Settings of the kind `judge`: a model votes on the outcome, and the mean of its votes is the reward. A vote is a
    number from `lowest` to `highest` in `\\boxed{}`."""

    votes: int = 3
    """Number of votes; with 1, the reward is a single score."""
    lowest: float = 0.0
    highest: float = 1.0
    solved_at: float | None = None
    """Mean from which the task is solved; None for the middle of the range."""
    template: str = ""
    """Template of the prompt, in Jinja; the default one if empty."""
    temperature: float = 1.0
    """Sampling temperature of the votes."""
    max_tokens: int = 4096
    """Maximum number of tokens of one vote."""
    characters: int = 32_000
    """Maximum number of characters of the conversation that the judge is shown, from its end."""

    @property
    def threshold(self) -> float:
        """Mean from which the task is solved."""
        return (self.lowest + self.highest) / 2 if self.solved_at is None else self.solved_at


def why_no_judge(judge: JudgeSpec) -> str | None:
    """Return why these settings cannot work, beginning with the key; None if they can."""
    for key in ("votes", "max_tokens", "characters"):
        if getattr(judge, key) < 1:
            return f"{key}: {getattr(judge, key)} must be at least 1"
    if not 0 <= judge.temperature < float("inf"):
        return f"temperature: {judge.temperature} must be a number from 0"
    if not -MAX_REWARD <= judge.lowest < judge.highest <= MAX_REWARD:
        return f"lowest: must satisfy -{MAX_REWARD:g} <= lowest < highest <= {MAX_REWARD:g}"
    if not judge.lowest < judge.threshold <= judge.highest:
        return f"solved_at: {judge.threshold:g} must be above lowest ({judge.lowest:g}) and at most highest"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOrigin(StrictRecord):
    """Origin of a task: its data set, the split that it is in there, and the licence of that data."""

    source: str = ""
    split: str = ""
    licence: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryFile(StrictRecord):
    """A file that is stored by reference. `file` is its absolute path on this machine (in a task file: relative to that
    file's folder); `sha256` is hexadecimal and `size` in bytes. Two references are equal if their contents are."""

    file: str = field(compare=False)
    sha256: str = ""
    size: int = -1

    def read(self) -> bytes:
        """Return the content. Raises TaskFileError if it has changed or cannot be read."""
        try:
            content = Path(self.file).read_bytes()
        except OSError as error:
            raise TaskFileError(f"{self.file}: cannot be read: {error.strerror}; restore the task's file") from error
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise TaskFileError(f"{self.file}: has changed since its task was read; restore it (SHA-256 {self.sha256})")
        return content


def least(*limits: float | None) -> float | None:
    """Return the lowest of the limits that are set, or None."""
    return min((limit for limit in limits if limit is not None), default=None)


def secret_in_prompt(secret: object, prompt: str) -> str | None:
    """Return the first text of at least SECRET_CHARACTERS in a secret (JSON) that the prompt contains, or None."""
    match secret:
        case str() if len(secret.strip()) >= SECRET_CHARACTERS and secret.strip() in prompt:
            return secret.strip()
        case Mapping():
            found = (secret_in_prompt(value, prompt) for value in secret.values())
        case list() | tuple():
            found = (secret_in_prompt(value, prompt) for value in secret)
        case _:
            return None
    return next((text for text in found if text is not None), None)
