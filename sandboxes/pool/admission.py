"""Who may boot a sandbox on one host or account now: places, a token bucket, a bounded queue and a circuit breaker.

Invariants:
- A boot begins when it has a place, a token, and a breaker that allows it; every try of a boot takes a token.
- The queue is bounded: whoever does not fit is told at once when to come again. A retry has been let in before.
- Pure: no I/O, `now` is an argument; seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.sandboxes.errors import CapacityExceeded, PermanentSandboxError, TransientSandboxError
from headrace.sandboxes.pool.circuit_breaker import BreakerState, CircuitBreaker
from headrace.sandboxes.pool.slots import Slots
from headrace.sandboxes.pool.token_bucket import TokenBucket

if TYPE_CHECKING:
    from headrace.sandboxes.pool.slots import Priority, Ticket

_REMEMBERED_GRANTS: Final = 32
_RETRY_AFTER_S: Final = (1.0, 60.0)
"""Bounds of an estimated `retry_after_s`."""


class AdmissionConfig(BaseModel):
    """Places of one sandbox host or account."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_live: int = Field(default=64, ge=2)
    """Sandboxes that boot or run at once on one host."""
    boot_concurrency: int = Field(default=8, ge=1)
    """Boots at once; more only wait for each other on the same cores."""
    evaluation_reserve: int = Field(default=4, ge=1)
    """Places of `max_live` that only evaluations may take."""
    held_out_share: float = Field(default=0.5, gt=0, le=1)
    """While training rollouts wait: the most that agents on held-out tasks may take of the boots at once and of the
    places. When none waits they take what is free. 1 lets an evaluation go first with all that it has."""
    boots_per_s: float = Field(default=1000.0, gt=0)
    """Boots that begin in a second, retries included; for an account with a rate limit, stay below it."""
    burst: int = Field(default=256, ge=1)
    """Boots that may begin at once after a quiet time."""
    max_waiting: int = Field(default=4096, ge=1)
    """Boots in the queue of one host; further ones are refused at once and told when to come again."""
    breaker_failures: int = Field(default=8, ge=1)
    """Transient failures in a row after which a host gets no boots; load that it sheds does not count."""
    breaker_open_s: float = Field(default=5.0, gt=0)
    """How long it gets none before one probe."""

    @model_validator(mode="after")
    def _reserve_leaves_room(self) -> AdmissionConfig:
        if self.evaluation_reserve >= self.max_live:
            raise ValueError(
                f"evaluation_reserve={self.evaluation_reserve} leaves no place of max_live={self.max_live}"
            )
        return self


class Admission:
    """Tickets wait, are granted (they boot), become live, and leave from any of these."""

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
        """What waits, boots or lives, over what may live."""
        return (self.waiting + self.booting + self.live) / self._config.max_live

    def has_room(self, priority: Priority) -> bool:
        return self._places.has_room(priority)

    def is_short(self) -> bool:
        """Somebody waits for whom no place is free; warm ones can wait."""
        return self._places.is_short()

    def breaker(self, now: float) -> BreakerState:
        return self._breaker.state(now)

    def ask(self, ticket: Ticket, now: float, *, again: bool = False) -> None:
        """Queue for a boot; `grant` says when. Raises CapacityExceeded when the queue is full and this is not
        `again`."""
        if not again and self.waiting >= self._config.max_waiting:
            raise CapacityExceeded(
                f"{self.waiting} boots wait already (max_waiting={self._config.max_waiting}): ask again later",
                self._retry_after_s(now),
            )
        self._places.ask(ticket)

    def _retry_after_s(self, now: float) -> float:
        """The time in which the queue of now is served, by the rate of the last grants."""
        rate_per_s = self._config.boots_per_s
        if len(self._granted_at_s) > 1 and now > self._granted_at_s[0]:
            rate_per_s = min(rate_per_s, len(self._granted_at_s) / (now - self._granted_at_s[0]))
        shortest_s, longest_s = _RETRY_AFTER_S
        return min(longest_s, max(shortest_s, self.waiting / rate_per_s))

    def grant(self, now: float) -> list[Ticket]:
        """Tickets that may boot now, in order; they are booting from here on."""
        granted: list[Ticket] = []
        while self._breaker.allows(now) and (ticket := self._places.next()) is not None and self._bucket.take(now):
            self._places.start(ticket)
            self._breaker.begin(ticket, now)
            self._granted_at_s.append(now)
            granted.append(ticket)
        return granted

    def next_grant_s(self, now: float) -> float | None:
        """Seconds until `grant` gives more without anything else happening; None when that does not depend on time."""
        if self._places.next() is None:
            return None
        wait_s = max(self._bucket.next_s(now), self._breaker.next_s(now))
        return wait_s if wait_s > 0 else None

    def booted(self, ticket: Ticket) -> None:
        self._places.booted(ticket)
        self._breaker.succeeded(ticket)

    def failed(self, ticket: Ticket, error: BaseException, now: float) -> None:
        """The boot ended with an error, and gives its place back."""
        self._places.leave(ticket)
        if isinstance(error, PermanentSandboxError | CapacityExceeded):
            # Whoever refuses, answers.
            self._breaker.succeeded(ticket)
        elif isinstance(error, TransientSandboxError):
            self._breaker.failed(ticket, now)
        self._breaker.ended(ticket)

    def adopt(self, ticket: Ticket) -> None:
        """A sandbox of an earlier life of the pool has its place again."""
        self._places.adopt(ticket)

    def leave(self, ticket: Ticket) -> None:
        """Give the place back: withdrawn, frozen, released or dead. Idempotent."""
        self._places.leave(ticket)
        self._breaker.ended(ticket)
