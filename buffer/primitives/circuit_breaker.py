"""Circuit breaker that stops calls to a resource that keeps failing, apart from probes. Pure: `now` is an argument.

Invariants:
- `failures_to_open` failures open the breaker, and so does a failed probe. While it is open, no call may begin.
- Once its delay is over, the breaker is half-open: one probe may begin. A successful probe closes the breaker.
- If calls are named, a probe has no time limit, and one that ends with neither success nor failure makes room for the
  next probe. Calls that began before the breaker opened no longer count.
- If calls are not named, every result counts, and a probe must report within one delay; after that, the next probe may
  begin.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from enum import StrEnum


class BreakerState(StrEnum):
    """State of a breaker: which calls it allows."""

    CLOSED = "closed"
    """All calls."""
    OPEN = "open"
    """No call."""
    HALF_OPEN = "half_open"
    """One probe."""


class CircuitBreaker:
    """Breaker for one resource. Times are seconds of a single monotonic clock.

    Without `window_s`, only failures with no success between them count. With it, all failures within the window count,
    even with successes between them. Each opening doubles the delay from `open_s` up to `longest_open_s` (by default
    the delay does not grow). The delay is reset to `open_s` by a window without failures, or, if there is no
    `window_s`, by a success."""

    def __init__(
        self,
        failures_to_open: int,
        open_s: float,
        *,
        longest_open_s: float | None = None,
        window_s: float | None = None,
    ) -> None:
        self.open_s = open_s
        self.longest_open_s = open_s if longest_open_s is None else longest_open_s
        self._failures_to_open = failures_to_open
        self._window_s = math.inf if window_s is None else window_s
        self._failed_at_s: deque[float] = deque()
        self._last_failure_s = -math.inf
        self._openings = 0
        self._open_until_s: float | None = None
        self._probe: Hashable | None = None

    @property
    def delay_s(self) -> float:
        """Seconds from the last opening until its probe, or from the next opening if there has been none."""
        # Bounded exponent: the power would overflow for a resource that never recovers.
        return min(self.open_s * 2.0 ** min(max(0, self._openings - 1), 30), self.longest_open_s)

    def state(self, now: float) -> BreakerState:
        if self._open_until_s is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until_s else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Return whether a call may begin now."""
        return self.state(now) is not BreakerState.OPEN and self._probe is None

    def next_s(self, now: float) -> float:
        """Return the seconds until a probe may begin; 0 unless the breaker is open."""
        return max(0.0, self._open_until_s - now) if self._open_until_s is not None else 0.0

    def begin(self, now: float, call: Hashable | None = None) -> None:
        """Record the start of a call."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._probe = call
            if call is None:
                self._open_until_s = now + self.delay_s

    def succeeded(self, call: Hashable | None = None) -> None:
        if self._open_until_s is not None and call not in (None, self._probe):
            return
        self._open_until_s = self._probe = None
        if self._window_s == math.inf:
            self._failed_at_s.clear()
            self._openings = 0

    def failed(self, now: float, call: Hashable | None = None) -> None:
        is_open = self._open_until_s is not None
        if is_open and call not in (None, self._probe):
            return
        if now - self._last_failure_s > self._window_s:
            self._openings = 0
        self._last_failure_s = now
        self._failed_at_s.append(now)
        while now - self._failed_at_s[0] > self._window_s:
            self._failed_at_s.popleft()
        if is_open or len(self._failed_at_s) >= self._failures_to_open:
            self._failed_at_s.clear()
            self._openings += 1
            self._open_until_s, self._probe = now + self.delay_s, None

    def ended(self, call: Hashable) -> None:
        """Record that a call ended without a result, because it was cancelled or refused for an unrelated reason.
        Idempotent."""
        if call == self._probe:
            self._probe = None
