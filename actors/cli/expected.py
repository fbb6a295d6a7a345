"""Errors that the user can fix, shown as one line; any other error is a defect and keeps its traceback."""

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
