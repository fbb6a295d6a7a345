"""A circuit breaker: no calls to what keeps failing, but one probe now and then. Pure: `now` is an argument.

Invariants:
- `failures_to_open` failures with no success between them open it; while it is open nothing begins.
- After `open_s` it is half-open: exactly one call begins, the probe. Its success closes, its failure opens again; a
  probe that ends without either makes room for the next.
- Calls that began before it opened change nothing any more.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half_open"
    """One probe."""


class CircuitBreaker:
    """Calls are named by any hashable. Times are seconds of one monotonic clock."""

    def __init__(self, failures_to_open: int, open_s: float) -> None:
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._failures = 0
        self._closes_at_s: float | None = None
        self._probe: Hashable | None = None

    def state(self, now: float) -> BreakerState:
        if self._closes_at_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._closes_at_s else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a call may begin now."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe is None)

    def begin(self, call: Hashable, now: float) -> None:
        """A call that was allowed begins."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._probe = call

    def succeeded(self, call: Hashable) -> None:
        if self._closes_at_s is None or call == self._probe:
            self._failures, self._closes_at_s, self._probe = 0, None, None

    def failed(self, call: Hashable, now: float) -> None:
        if self._closes_at_s is None:
            self._failures += 1
        elif call != self._probe:
            return
        if self._probe is not None or self._failures >= self._failures_to_open:
            self._closes_at_s, self._probe = now + self._open_s, None

    def ended(self, call: Hashable) -> None:
        """The call ended and says nothing: it was given up, or refused for a reason of its own. Idempotent."""
        if call == self._probe:
            self._probe = None

    def next_s(self, now: float) -> float:
        """Seconds until a probe may begin; 0 unless it is open."""
        return max(0.0, self._closes_at_s - now) if self._closes_at_s is not None else 0.0
