"""Admission of boots to one host or account: slots, a token bucket, a bounded queue and a circuit breaker.

Invariants:
- A boot begins when it has a slot and a token and the breaker allows it; every attempt takes a token.
- The queue is bounded: a boot that does not fit is refused at once and told when to retry. The bound does not apply to
  retries, which have already been admitted once.
- Pure: no I/O; `now` is an argument, in seconds of one monotonic clock.
- In any span of `w` seconds at most `burst + rate_per_s * w` tokens are taken.
"""

from __future__ import annotations

from collections import deque
from typing import Final, Self

from pydantic import Field, model_validator

from headrace.buffer.primitives.circuit_breaker import BreakerState, CircuitBreaker
from headrace.buffer.primitives.sections import Section
from headrace.sandboxes.errors import CapacityExceeded, PermanentSandboxError, TransientSandboxError
from headrace.sandboxes.pool.slots import Priority, Slots, Ticket

_REMEMBERED_GRANTS: Final = 32
_RETRY_AFTER_S: Final = (1.0, 60.0)
"""Bounds on an estimated `retry_after_s`."""


_ROUNDING_S: Final = 1e-6
"""A token that is due within this time counts as available: a timer set to `next_s` must find it despite rounding."""


class TokenBucket:
    """A bucket that starts full. Times are in seconds of one monotonic clock."""

    def __init__(self, rate_per_s: float, burst: int) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = float(burst)
        self._filled_at_s: float | None = None

    def take(self, now: float) -> bool:
        """Take a token and return True, or return False if there is none."""
        self._fill(now)
        if 1 - self._tokens > self._rate_per_s * _ROUNDING_S:
            return False
        self._tokens -= 1
        return True

    def next_s(self, now: float) -> float:
        """Return the number of seconds until a token is available; 0 if one is available now."""
        self._fill(now)
        return max(0.0, 1 - self._tokens) / self._rate_per_s

    def _fill(self, now: float) -> None:
        if self._filled_at_s is not None and now > self._filled_at_s:
            self._tokens = min(float(self._burst), self._tokens + (now - self._filled_at_s) * self._rate_per_s)
        self._filled_at_s = now if self._filled_at_s is None else max(now, self._filled_at_s)


class AdmissionSection(Section):
    """Admission limits of one sandbox host or account that a recipe sets."""

    max_live: int = Field(default=64, ge=2)
    """Maximum number of sandboxes booting or running on one host."""
    boot_concurrency: int = Field(default=8, ge=1)
    """Maximum number of concurrent boots; more would only compete for the same cores."""
    evaluation_reserve: int = Field(default=4, ge=1)
    """Number of the `max_live` slots that are reserved for evaluations."""
    held_out_share: float = Field(default=0.5, gt=0, le=1)
    """Largest share of the slots, and of the concurrent boots that checks leave to agents, which agents on held-out
    tasks may take while training rollouts are waiting; one boot at least. When none is waiting, they may take all that
    are free. With 1, an evaluation always goes first."""
    boots_per_s: float = Field(default=1000.0, gt=0)
    """Maximum number of boots that begin per second, including retries; for an account with a rate limit, stay below
    that limit."""

    @model_validator(mode="after")
    def _reserve_leaves_room(self) -> Self:
        if self.evaluation_reserve >= self.max_live:
            raise ValueError(f"evaluation_reserve={self.evaluation_reserve} must be below max_live={self.max_live}")
        return self


class AdmissionConfig(AdmissionSection):
    """All admission limits of one sandbox host or account."""

    burst: int = Field(default=256, ge=1)
    """Maximum number of boots that may begin at once after an idle period."""
    max_waiting: int = Field(default=4096, ge=1)
    """Maximum number of boots in one host's queue; further ones are refused at once and told when to retry."""
    breaker_failures: int = Field(default=8, ge=1)
    """Number of consecutive transient failures after which a host gets no boots; rate limiting does not count as a
    failure."""
    breaker_open_s: float = Field(default=5.0, gt=0)
    """Time for which a host that has failed `breaker_failures` times gets no boots; a single boot then probes it."""


class Admission:
    """Admission to one host. A ticket waits, is granted (and boots), and becomes live; it may leave at any stage."""

    def __init__(self, config: AdmissionConfig) -> None:
        self._config = config
        self._places = Slots(config.max_live, config.boot_concurrency, config.evaluation_reserve, config.held_out_share)
        self._bucket = TokenBucket(config.boots_per_s, config.burst)
        self._breaker = CircuitBreaker(config.breaker_failures, config.breaker_open_s)
        self._granted_at_s: deque[float] = deque(maxlen=_REMEMBERED_GRANTS)

    @property
    def waiting(self) -> int:
        return self._places.waiting

    @property
    def booting(self) -> int:
        return self._places.booting

    @property
    def live(self) -> int:
        return self._places.live

    @property
    def load(self) -> float:
        """Number of waiting, booting and live sandboxes, divided by `max_live`."""
        return (self.waiting + self.booting + self.live) / self._config.max_live

    def has_room(self, priority: Priority) -> bool:
        return self._places.has_room(priority)

    def is_short(self) -> bool:
        """Return whether a ticket other than a warm one is waiting without a free slot."""
        return self._places.is_short()

    def breaker(self, now: float) -> BreakerState:
        return self._breaker.state(now)

    def enqueue(self, ticket: Ticket, now: float, *, again: bool = False) -> None:
        """Queue a ticket until `grant` returns it. Raises CapacityExceeded when the queue is full, except for a retry
        (`again`)."""
        if not again and self.waiting >= self._config.max_waiting:
            # The time in which the current queue is served, at the rate of the last grants.
            rate_per_s = self._config.boots_per_s
            if len(self._granted_at_s) > 1 and now > self._granted_at_s[0]:
                rate_per_s = min(rate_per_s, len(self._granted_at_s) / (now - self._granted_at_s[0]))
            shortest_s, longest_s = _RETRY_AFTER_S
            raise CapacityExceeded(
                f"{self.waiting} boots are already waiting (max_waiting={self._config.max_waiting}): try again later",
                min(longest_s, max(shortest_s, self.waiting / rate_per_s)),
            )
        self._places.enqueue(ticket)

    def grant(self, now: float) -> list[Ticket]:
        """Return the tickets that may boot now, in order, and count them as booting."""
        granted: list[Ticket] = []
        while self._breaker.allows(now) and (ticket := self._places.next()) is not None and self._bucket.take(now):
            self._places.start(ticket)
            self._breaker.begin(now, ticket)
            self._granted_at_s.append(now)
            granted.append(ticket)
        return granted

    def next_grant_s(self, now: float) -> float | None:
        """Return the number of seconds until `grant` can return more tickets with no other event; None if waiting alone
        will not help."""
        if self._places.next() is None:
            return None
        wait_s = max(self._bucket.next_s(now), self._breaker.next_s(now))
        return wait_s if wait_s > 0 else None

    def booted(self, ticket: Ticket) -> None:
        self._places.booted(ticket)
        self._breaker.succeeded(ticket)

    def failed(self, ticket: Ticket, error: BaseException, now: float) -> None:
        """Free the slot of a boot that ended with an error."""
        self._places.leave(ticket)
        if isinstance(error, PermanentSandboxError | CapacityExceeded):
            # A host that refuses is reachable.
            self._breaker.succeeded(ticket)
        elif isinstance(error, TransientSandboxError):
            self._breaker.failed(now, ticket)
        self._breaker.ended(ticket)

    def adopt(self, ticket: Ticket) -> None:
        """Give a sandbox from an earlier pool its slot back."""
        self._places.adopt(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Free the slot of a ticket that was withdrawn, or whose sandbox was frozen or released, or died.
        Idempotent."""
        self._places.leave(ticket)
        self._breaker.ended(ticket)
