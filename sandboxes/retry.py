"""Retry table for sandboxes: the errors that are worth a retry, and the waits between attempts.

Invariants:
- Transient errors (the tree in `errors.py`) are retried a limited number of times, permanent ones never. For a provider
  at capacity the queue's time limit applies instead.
- A wait is drawn from 0 to its bound (full jitter). It is added to `retry_after_s`, so it never ends before that time.
- After an ambiguous error the sandbox may exist: only a retry with the same idempotency key finds out.
- A retry is a boot like any other: it goes through admission again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pydantic import Field
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, retry_if_exception_type, wait_random_exponential
from tenacity.stop import stop_base

from headrace.buffer.primitives.sections import Section
from headrace.sandboxes.errors import (
    BootTimeout,
    CapacityExceeded,
    PermanentSandboxError,
    ProviderUnreachable,
    TransientSandboxError,
)


class RetryConfig(Section):
    """Number and delay of the retries of a boot."""

    boot_attempts: int = Field(default=4, ge=1)
    """Maximum number of attempts for one boot; only transient errors are retried."""
    retry_base_s: float = Field(default=0.2, gt=0)
    """The n-th wait is drawn from 0 to `retry_base_s * 2**n` (full jitter)."""
    retry_max_s: float = Field(default=10.0, gt=0)
    """Upper bound of any wait between attempts, not counting a provider's own Retry-After."""


def is_transient(error: BaseException) -> bool:
    """Return True if a retry may help."""
    return isinstance(error, TransientSandboxError)


def is_ambiguous(error: BaseException) -> bool:
    """Return True if the effect of the failed call is unknown, so that it may have made a sandbox. This holds for every
    exception that is not a typed error, including cancellation."""
    return isinstance(error, BootTimeout | ProviderUnreachable) or not isinstance(
        error, TransientSandboxError | PermanentSandboxError
    )


def retrying(
    config: RetryConfig,
    out_of_time: Callable[[float], bool] = lambda _wait_s: False,
    waited_for_room: Callable[[], int] = lambda: 0,
) -> AsyncRetrying:
    """Return the retry policy of one boot, which raises the last error unchanged. No further attempt begins if it would
    be `out_of_time` after the wait. The first `waited_for_room` attempts do not count, because the provider answered
    that it had no capacity."""
    return AsyncRetrying(
        retry=retry_if_exception(is_transient),
        stop=_Stop(config.boot_attempts, out_of_time, waited_for_room),
        wait=FullJitter(config.retry_base_s, config.retry_max_s),
        reraise=True,
    )


def asking_again(config: RetryConfig) -> AsyncRetrying:
    """Return the retry policy of one idempotent request, which is repeated only if it got no answer."""
    return AsyncRetrying(
        retry=retry_if_exception_type(ProviderUnreachable),
        stop=_Stop(config.boot_attempts, lambda _wait_s: False, lambda: 0),
        wait=FullJitter(config.retry_base_s, config.retry_max_s),
        reraise=True,
    )


def full_jitter_s(config: RetryConfig, attempt: int) -> float:
    """Return the wait after the `attempt`-th failure, for retries by a separate task."""
    return random.uniform(0, min(config.retry_max_s, config.retry_base_s * 2.0 ** min(attempt, 30)))


class _Stop(stop_base):
    """Stop after a number of counted attempts, or when the caller is out of time."""

    def __init__(self, attempts: int, out_of_time: Callable[[float], bool], waited_for_room: Callable[[], int]) -> None:
        self._attempts = attempts
        self._out_of_time = out_of_time
        self._waited_for_room = waited_for_room

    def __call__(self, retry_state: RetryCallState) -> bool:
        counted = retry_state.attempt_number - self._waited_for_room()
        return counted >= self._attempts or self._out_of_time(retry_state.upcoming_sleep)


class FullJitter(wait_random_exponential):
    """Full jitter (AWS architecture blog, "Exponential backoff and jitter"), but never before the requested time."""

    def __init__(self, base_s: float, max_s: float) -> None:
        super().__init__(multiplier=base_s, max=max_s)

    def __call__(self, retry_state: RetryCallState) -> float:
        wait_s = super().__call__(retry_state)
        error = retry_state.outcome.exception() if retry_state.outcome is not None else None
        return wait_s + error.retry_after_s if isinstance(error, CapacityExceeded) else wait_s
