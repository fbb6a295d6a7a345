"""Tasks: one problem each, read from JSONL with a documented schema (docs/tasks.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from collections.abc import Mapping

TaskId = NewType("TaskId", str)


class EvaluatorKind(StrEnum):
    """How what the agent left is scored."""

    STATE = "state"
    """The agent's frozen data paths are mounted read-only in a clean sandbox, where `check` runs."""
    PATCH = "patch"
    """The changed text files under the data paths are applied to fresh copies in a second clean sandbox, with `hidden_files`, and
    `check` runs there. The agent never saw the hidden files."""
    NONE = "none"
    """Reward 1 for every finished rollout, no sandbox: for measuring the orchestration only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSpec:
    """`check` is Python source; exit code 0 means reward 1, exit code 1 means reward 0, anything else means the evaluator broke.
    `data_paths` are absolute paths in the agent's sandbox; nothing else of it is looked at. `hidden_files` maps absolute paths to text."""

    kind: EvaluatorKind
    check: str = ""
    data_paths: tuple[str, ...] = ("/workspace",)
    hidden_files: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem. `files` (absolute path inside the sandbox -> text) are written before the agent starts."""

    id: TaskId
    family: str
    instruction: str
    evaluator: EvaluatorSpec
    image: str = "host"
    files: Mapping[str, str] = field(default_factory=dict)
