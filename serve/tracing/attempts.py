"""The attempt of a rollout that the current task works for, so that whatever is logged meanwhile names it.

Invariant: the attempt belongs to a task and the tasks and threads that it starts, never to a whole process. Work that
is done for several attempts together, such as a batched call, has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ROLLOUT_ATTEMPT: ContextVar[tuple[str, int] | None] = ContextVar("headrace_rollout_attempt", default=None)
"""Rollout id and attempt that the current task works for; None for work that belongs to no single attempt."""


@contextmanager
def working_for(attempt: tuple[str, int] | None) -> Iterator[None]:
    """Let the current task work for an attempt (rollout id and number), or for none, until the block ends."""
    token = ROLLOUT_ATTEMPT.set(attempt)
    try:
        yield
    finally:
        ROLLOUT_ATTEMPT.reset(token)
