"""Retry policy of calls between actors: idempotent calls are repeated while their actor is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, wait_random_exponential

from headrace.actors.errors import ActorGone, ActorLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

R = TypeVar("R")

DEFAULT_ABSENT_S: Final = 120.0
"""A process that imports torch takes about 15 s to restart with cold caches."""


@dataclass(slots=True)
class Absence:
    """Time that this process waits for a lost actor: `cluster.absent_s`, the same in every process of a run."""

    seconds: float = DEFAULT_ABSENT_S


ABSENCE: Final = Absence()
"""Setting of this process. `RayRuntime` passes it on to every actor that it starts."""


async def until_back(call: Callable[[], Awaitable[R]], *, deadline_s: float | None = None) -> R:
    """Repeat an idempotent call while its actor restarts. Raises ActorGone when the actor is lost for `deadline_s`
    (None: `cluster.absent_s`), and other errors at once.

    The time counts from the loss, not from the call, which may have run for long before."""
    # Tenacity costs more than most calls, so it only handles a call that failed.
    try:
        return await call()
    except ActorLost as error:
        first = error
    deadline_s = ABSENCE.seconds if deadline_s is None else deadline_s
    now = asyncio.get_running_loop().time
    lost_s = now()
    policy = AsyncRetrying(
        retry=retry_if_exception_type(ActorLost),
        wait=wait_random_exponential(multiplier=0.1, max=2.0),
        stop=lambda _: now() - lost_s >= deadline_s,
    )
    try:
        async for attempt in policy:
            with attempt:
                if attempt.retry_state.attempt_number == 1:
                    raise first
                began_s = now()
                try:
                    return await call()
                except ActorLost:
                    if now() - began_s > deadline_s / 2:
                        lost_s = now()
                    raise
    except RetryError as error:
        lost = error.last_attempt.exception()
        raise ActorGone(f"{lost}; it was not back after {deadline_s:g} s (cluster.absent_s)") from lost
    raise AssertionError("tenacity ended without a result or an error")
