"""Errors that a person can mend: shown as one line. Anything else is a defect and keeps its traceback."""

from __future__ import annotations

from headrace.actors.errors import ActorError, RunError
from headrace.buffer.errors import ReplayError, TaskFileError
from headrace.policies.errors import PolicyError
from headrace.policies.learner_errors import LearnerError
from headrace.sandboxes.errors import SandboxError
from headrace.serve.errors import ServeError

EXPECTED: tuple[type[Exception], ...] = (
    RunError,
    ActorError,
    ReplayError,
    TaskFileError,
    PolicyError,
    LearnerError,
    SandboxError,
    ServeError,
)
