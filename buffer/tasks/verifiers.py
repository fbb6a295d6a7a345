"""The specification of tasks that a verifier scores: a script or tests that come to the sandbox after the agent's end.

Invariants:
- A spec that `why_not_runnable` passes can be run; others are refused before anything boots.
- All files of a verifier are hidden files below TESTS, a folder that is emptied before they are written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from headrace.buffer.primitives.sections import StrictRecord
from headrace.buffer.tasks.repositories import is_plain_path

TESTS: Final = "/tests"
LOGS: Final = "/logs"
SCRIPT: Final = f"{TESTS}/test.sh"


class VerifierForm(StrEnum):
    """Form of a verifier."""

    HARBOR = "harbor"
    """`/tests/test.sh` runs as root and leaves a number in /logs/verifier/reward.txt, or numbers by name in
    /logs/verifier/reward.json."""
    PYTEST = "pytest"
    """The hidden files called `test_*.py` or `*_test.py` are run by the pytest of `evaluator.python`: the reward is 1
    if all pass and 0 if one fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierSpec(StrictRecord):
    """A verifier."""

    form: VerifierForm
    live: bool = False
    """Whether it runs in the agent's own sandbox, after all processes in it were ended. Otherwise it runs in a clean
    sandbox, in which the data paths are mounted read-only."""
    allow_root: bool = False
    """Whether a live verifier runs even if the agent was root, who may have replaced every program of the sandbox."""
    workdir: str = ""
    """Working directory of test.sh; empty means that of the image."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of test.sh."""
    solved_at: float = 1.0
    """Reward from which the task is solved."""


def pytest_files(hidden_files: Collection[str]) -> tuple[str, ...]:
    """Return the paths of the test files among the hidden files."""
    names = ((path, path.rsplit("/", 1)[-1]) for path in sorted(hidden_files))
    return tuple(
        path for path, name in names if name.endswith("_test.py") or (name.startswith("test_") and name.endswith(".py"))
    )


def why_not_runnable(spec: VerifierSpec, hidden_files: Collection[str], data_paths: Collection[str]) -> str | None:
    """Return the key and reason for the first value of an evaluator that is invalid although its type is right; None if
    there is none."""
    for path in hidden_files:
        if not path.startswith(f"{TESTS}/"):
            return f"hidden_files: {path!r} must be below {TESTS}"
    if spec.form is VerifierForm.HARBOR and SCRIPT not in hidden_files:
        return f"hidden_files: has no {SCRIPT}; add it"
    if spec.form is VerifierForm.PYTEST and not pytest_files(hidden_files):
        return f"hidden_files: has no test_*.py or *_test.py below {TESTS}; add one"
    for path in data_paths:
        for folder in (TESTS, LOGS):
            if f"{path.rstrip('/')}/".startswith(f"{folder}/") or f"{folder}/".startswith(f"{path.rstrip('/')}/"):
                return f"data_paths: {path!r} overlaps with {folder}, which belongs to the verifier"
    if spec.workdir and not is_plain_path(spec.workdir):
        return f"verifier.workdir: {spec.workdir!r} must be an absolute path without '.' or '..'"
    if not math.isfinite(spec.solved_at):
        return f"verifier.solved_at: {spec.solved_at} must be a finite number"
    if spec.form is VerifierForm.PYTEST and (spec.environment or spec.workdir or spec.solved_at != 1.0):
        return "verifier: environment, workdir and solved_at belong to the form harbor; remove them"
    if spec.allow_root and not spec.live:
        return "verifier.allow_root: belongs to live verifiers; remove it"
    return None
