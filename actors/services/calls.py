"""Calls to one service: slots, deadlines, retries, a circuit breaker and counts, whatever the protocol.

Invariants:
- A call ends with an answer or with ServiceDown, at most `retry.total_s` after it got its slot.
- A request is sent again only after an error that may pass (ServiceUnavailable), at most `retry.attempts - 1` times.
- The circuit opens after `FAILURES_TO_OPEN` calls in a row have failed in that way. While it is open calls fail at
  once; then one call probes the service, with a single request.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from headrace.actors.record.files.service_totals import ServiceTotals
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.figures import ServiceFigures, current_service_time
from headrace.actors.services.service import ServiceDown
from headrace.buffer.primitives.circuit_breaker import BreakerState, CircuitBreaker

R = TypeVar("R")

FAILURES_TO_OPEN: Final = 3
OPEN_S: Final = 2.0
LONGEST_OPEN_S: Final = 60.0
RETRY_BASE_S: Final = 0.2
RETRY_MAX_S: Final = 10.0
DECREASE: Final = 0.5
"""Factor by which an overload lowers the limit."""


class ServiceRefused(Exception):
    """The service answered, but not with what was asked; another request would get the same."""


class ServiceUnavailable(Exception):
    """The service could not answer this time. `overloaded` is set if fewer calls at once would help; `retry_after_s`
    is what it asked to wait."""

    def __init__(self, reason: str, *, overloaded: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.overloaded = overloaded
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that a request used, as counted by the service."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class ServiceCalls:
    """All calls of one worker to one service."""

    def __init__(self, name: str, config: ServiceConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._config = config
        self._clock = clock
        self._limit = CallLimit(least=1, most=config.max_concurrency)
        self._slots = CallSlots(self._limit)
        self._breaker = CircuitBreaker(FAILURES_TO_OPEN, OPEN_S, longest_open_s=LONGEST_OPEN_S)
        self._last_failure = ""
        self._totals = ServiceTotals()

    def figures(self) -> ServiceFigures:
        """Return the figures up to now."""
        return ServiceFigures(
            totals=self._totals,
            limit=self._limit.limit,
            in_flight=self._limit.in_use,
            waiting=self._slots.waiting,
        )

    def used(self, usage: Usage) -> None:
        """Record an answered request: its tokens and its price."""
        price = self._config.price
        cost = (usage.prompt_tokens * price.prompt_1k + usage.completion_tokens * price.completion_1k) / 1000
        self._count(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens, cost=cost + price.request
        )

    async def __call__(self, send: Callable[[], Awaitable[R]]) -> R:
        """Return the result of `send`, which sends one request and raises ServiceUnavailable or ServiceRefused. Raises
        ServiceDown."""
        measured = current_service_time()
        with measured.within(self.name):
            try:
                asked_s = self._clock()
                async with self._slots.slot():
                    began_s = self._clock()
                    self._count(waiting_s=began_s - asked_s)
                    try:
                        return await self._within_circuit(send)
                    finally:
                        self._count(calling_s=self._clock() - began_s)
            except asyncio.CancelledError:
                measured.interrupted = self.name
                raise

    async def _within_circuit(self, send: Callable[[], Awaitable[R]]) -> R:
        breaker, call, began_s = self._breaker, object(), self._clock()
        if not breaker.allows(began_s):
            self._count(calls=1, failures=1)
            raise ServiceDown(
                self.name,
                f"the last calls failed, so none is made for now ({breaker.next_s(began_s):.1f} s left): "
                f"{self._last_failure}",
            )
        attempts = 1 if breaker.state(began_s) is BreakerState.HALF_OPEN else self._config.retry.attempts
        breaker.begin(began_s, call)
        try:
            answer = await self._retried(send, attempts)
        except ServiceUnavailable as error:
            self._last_failure = str(error)
            breaker.failed(self._clock(), call)
            self._count(calls=1, failures=1)
            raise ServiceDown(self.name, str(error)) from error
        except ServiceRefused as error:
            breaker.succeeded(call)
            self._count(calls=1, failures=1)
            raise ServiceDown(self.name, str(error)) from error
        else:
            breaker.succeeded(call)
            self._limit.succeeded()
            self._count(calls=1)
            return answer
        finally:
            breaker.ended(call)

    async def _retried(self, send: Callable[[], Awaitable[R]], attempts: int) -> R:
        retry, start_s = self._config.retry, self._clock()

        async def attempt() -> R:
            began_s = self._clock()
            limit_s = min(self._config.timeout_s, start_s + retry.total_s - began_s)
            try:
                async with asyncio.timeout(limit_s):
                    return await send()
            except TimeoutError as error:
                self._limit.overloaded(began_s, self._clock())
                raise ServiceUnavailable(f"no answer within {limit_s:.3g} s") from error
            except ServiceUnavailable as error:
                if error.overloaded:
                    self._limit.overloaded(began_s, self._clock())
                raise

        return await AsyncRetrying(
            retry=retry_if_exception_type(ServiceUnavailable),
            stop=stop_after_attempt(attempts) | stop_before_delay(retry.total_s),
            wait=_wait_s,
            before_sleep=lambda _: self._count(retries=1),
            reraise=True,
        )(attempt)

    def _count(self, **more: float) -> None:
        self._totals = replace(self._totals, **{key: getattr(self._totals, key) + more[key] for key in more})


_jitter: Final = wait_random_exponential(multiplier=RETRY_BASE_S, max=RETRY_MAX_S)


def _wait_s(state: RetryCallState) -> float:
    """Return the wait before the next request: full jitter, and never before the time that the service asked for."""
    error = state.outcome.exception() if state.outcome is not None else None
    return _jitter(state) + (error.retry_after_s if isinstance(error, ServiceUnavailable) else 0.0)


class CallLimit:
    """Adaptive limit on concurrent calls (additive increase, multiplicative decrease), and the number in progress.
    Pure: `now` is an argument, in seconds of one monotonic clock.

    The limit begins at `most` and is at least `least`. An overload halves it, once for all calls that were in progress
    at that moment: they met the same overload. It grows by one after as many successes as it allows calls, and only
    while it is what holds calls back. (D. Chiu and R. Jain, Computer Networks and ISDN Systems 17(1), 1989.)"""

    def __init__(self, *, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.in_use = 0
        self._limit = float(most)
        self._successes = 0
        self._decreased_s = float("-inf")

    @property
    def limit(self) -> int:
        """Number of calls that may be in progress at once."""
        return int(self._limit)

    @property
    def has_room(self) -> bool:
        """True if another call may begin. After a decrease there may be more calls in progress than the limit."""
        return self.in_use < self.limit

    def begin(self) -> None:
        """Record the start of a call."""
        self.in_use += 1

    def end(self) -> None:
        """Record the end of a call, whatever its result."""
        self.in_use -= 1

    def succeeded(self) -> None:
        """Record a success, before the end of its call."""
        if self.has_room:
            return
        self._successes += 1
        if self._successes >= self.limit:
            self._successes = 0
            self._limit = min(float(self.most), self._limit + 1.0)

    def overloaded(self, began_s: float, now: float) -> None:
        """Record that the service was too slow for a request that began at `began_s`, or answered that it is
        overloaded."""
        if began_s < self._decreased_s:
            return
        self._limit = max(float(self.least), self._limit * DECREASE)
        self._successes, self._decreased_s = 0, now


class CallSlots:
    """Slots for calls under an adaptive limit."""

    def __init__(self, limit: CallLimit) -> None:
        self._limit = limit
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Number of calls that wait for a slot."""
        return len(self._queue)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot for the block, after waiting for it."""
        if self._queue or not self._limit.has_room:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    # Absent if a call that ended since has passed over it.
                    with suppress(ValueError):
                        self._queue.remove(turn)
                else:
                    # The slot had been given already when the caller was cancelled.
                    self._give_back()
                raise
        else:
            self._limit.begin()
        try:
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._limit.end()
        # A loop, since the limit may have grown by more than this one call.
        while self._queue and self._limit.has_room:
            turn = self._queue.popleft()
            if not turn.cancelled():
                self._limit.begin()
                turn.set_result(None)
