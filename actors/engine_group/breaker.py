"""A circuit breaker: what fails again and again is tried again ever more seldom. Pure: no clock, `now` is monotonic
seconds.

Invariants:
- Closed it allows every try. `failures` of them within `window_s` open it, and so does a failed probe.
- Open it allows nothing until its delay is over, then one probe in each delay. A probe that succeeds closes it.
- Each opening doubles the delay, up to `longest_s`; only a whole window without a failure makes it short again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum


class BreakerState(StrEnum):
    """Whether a try is allowed."""

    CLOSED = "closed"
    """Every one."""
    OPEN = "open"
    """None."""
    HALF_OPEN = "half_open"
    """One."""


@dataclass(slots=True, kw_only=True)
class CircuitBreaker:
    """Of one engine, or of the place where engines are started again and again."""

    failures: int = 3
    window_s: float = 300.0
    cool_down_s: float = 10.0
    longest_s: float = 300.0
    _failed_at_s: deque[float] = field(default_factory=deque)
    _openings: int = 0
    _last_failure_s: float | None = None
    _open_until_s: float | None = None

    def state(self, now: float) -> BreakerState:
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self._open_until_s else BreakerState.OPEN

    def allows(self, now: float) -> bool:
        return self.state(now) is not BreakerState.OPEN

    def tried(self, now: float) -> None:
        """A try begins. A probe has one delay to tell how it went; then the next one may begin."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._open_until_s = now + self.delay_s

    def succeeded(self) -> None:
        """A try went well. What failed before is not forgotten: only time does that."""
        self._open_until_s = None

    def failed(self, now: float) -> None:
        if self._last_failure_s is not None and now - self._last_failure_s > self.window_s:
            self._openings = 0
        self._last_failure_s = now
        self._failed_at_s.append(now)
        while now - self._failed_at_s[0] > self.window_s:
            self._failed_at_s.popleft()
        if self._open_until_s is not None or len(self._failed_at_s) >= self.failures:
            self._failed_at_s.clear()
            self._openings += 1
            self._open_until_s = now + self.delay_s

    @property
    def delay_s(self) -> float:
        """From an opening to the next probe."""
        # The exponent is bounded, or the power of an engine that never comes back would overflow.
        return min(self.cool_down_s * 2.0 ** min(max(0, self._openings - 1), 30), self.longest_s)
