"""The one retry table of the sandboxes: which errors are worth another try, and when.

Invariants:
- Transient errors (the tree in `errors.py`) are tried again, a limited number of times; permanent ones never. A full
  provider is waited for, by the clock of the queue.
- A wait is drawn from 0 to its bound (full jitter), on top of a `retry_after_s`, never before it.
- After an ambiguous error the sandbox may exist: only the same idempotency key finds out.
- A retry is a boot like any other: whoever tries again goes through the admission again.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field
from tenacity import AsyncRetrying, retry_if_exception, retry_if_exception_type, wait_random_exponential
from tenacity.stop import stop_base

from headrace.sandboxes.errors import (
    BootTimeout,
    CapacityExceeded,
    PermanentSandboxError,
    ProviderUnreachable,
    TransientSandboxError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tenacity import RetryCallState


class RetryConfig(BaseModel):
    """How often and how soon a boot is tried again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boot_attempts: int = Field(default=4, ge=1)
    """Tries of one boot; only transient errors are tried again."""
    retry_base_s: float = Field(default=0.2, gt=0)
    """The n-th wait is drawn from 0 to `retry_base_s * 2**n` (full jitter)."""
    retry_max_s: float = Field(default=10.0, gt=0)
    """Upper end of any wait between tries, not counting a provider's own Retry-After."""


def is_transient(error: BaseException) -> bool:
    """Another try may help."""
    return isinstance(error, TransientSandboxError)


def is_ambiguous(error: BaseException) -> bool:
    """What the call did is unknown: it may have made a sandbox. So is all that is no typed error, cancellation too."""
    return isinstance(error, BootTimeout | ProviderUnreachable) or not isinstance(
        error, TransientSandboxError | PermanentSandboxError
    )


def retrying(
    config: RetryConfig,
    out_of_time: Callable[[float], bool] = lambda _wait_s: False,
    waited_for_room: Callable[[], int] = lambda: 0,
) -> AsyncRetrying:
    """The policy of one boot; the last error is raised as it is. No try begins that would be `out_of_time` after the
    wait before it; the first `waited_for_room` tries do not count: they were answered, there was no room."""
    return AsyncRetrying(
        retry=retry_if_exception(is_transient),
        stop=_Stop(config.boot_attempts, out_of_time, waited_for_room),
        wait=FullJitter(config.retry_base_s, config.retry_max_s),
        reraise=True,
    )


def asking_again(config: RetryConfig) -> AsyncRetrying:
    """The policy of one request that may be repeated: only what got no answer is sent again."""
    return AsyncRetrying(
        retry=retry_if_exception_type(ProviderUnreachable),
        stop=_Stop(config.boot_attempts, lambda _wait_s: False, lambda: 0),
        wait=FullJitter(config.retry_base_s, config.retry_max_s),
        reraise=True,
    )


def full_jitter_s(config: RetryConfig, attempt: int) -> float:
    """A wait after the `attempt`-th failure, for what is retried by a task of its own."""
    return random.uniform(0, min(config.retry_max_s, config.retry_base_s * 2.0 ** min(attempt, 30)))


class _Stop(stop_base):
    """After so many tries that count, or when the caller says so."""

    def __init__(self, attempts: int, out_of_time: Callable[[float], bool], waited_for_room: Callable[[], int]) -> None:
        self._attempts = attempts
        self._out_of_time = out_of_time
        self._waited_for_room = waited_for_room

    def __call__(self, retry_state: RetryCallState) -> bool:
        counted = retry_state.attempt_number - self._waited_for_room()
        return counted >= self._attempts or self._out_of_time(retry_state.upcoming_sleep)


class FullJitter(wait_random_exponential):
    """Full jitter (AWS architecture blog, "Exponential backoff and jitter"), but never before the asked time."""

    def __init__(self, base_s: float, max_s: float) -> None:
        super().__init__(multiplier=base_s, max=max_s)

    def __call__(self, retry_state: RetryCallState) -> float:
        wait_s = super().__call__(retry_state)
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        return wait_s + error.retry_after_s if isinstance(error, CapacityExceeded) else wait_s
