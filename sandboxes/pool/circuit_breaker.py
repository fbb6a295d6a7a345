"""Circuit breaker: stops calls to a service that keeps failing, except for occasional probes.

Pure: `now` is an argument.

Invariants:
- `failures_to_open` failures without a success between them open it; while it is open no call may begin.
- After `open_s` it is half-open: exactly one call may begin, the probe. Its success closes the breaker, its failure
  opens it again; a probe that ends with neither makes room for the next.
- Calls that began before it opened no longer change its state.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


class BreakerState(StrEnum):
    """State of a circuit breaker."""

    CLOSED = "closed"
    """All calls may begin."""
    OPEN = "open"
    """No call may begin."""
    HALF_OPEN = "half_open"
    """One probe may begin."""


class CircuitBreaker:
    """A breaker for calls that are identified by any hashable. Times are seconds of one monotonic clock."""

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
        """Return whether a call may begin now."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and self._probe is None)

    def begin(self, call: Hashable, now: float) -> None:
        """Record the start of a call that was allowed."""
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
        """Record the end of a call that was neither a success nor a failure of the service. Idempotent."""
        if call == self._probe:
            self._probe = None

    def next_s(self, now: float) -> float:
        """Return the seconds until a probe may begin; 0 unless it is open."""
        return max(0.0, self._closes_at_s - now) if self._closes_at_s is not None else 0.0
