"""Token bucket, which limits the burst and the average rate of calls. Pure: `now` is an argument.

Invariant: in any span of `w` seconds at most `burst + rate_per_s * w` tokens are taken.
"""

from __future__ import annotations

from typing import Final

_ROUNDING_S: Final = 1e-6
"""A token that is due within this time counts as available: a timer set to `next_s` must find it despite rounding."""


class TokenBucket:
    """A bucket that starts full. Times are seconds of one monotonic clock."""

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
        """Return the seconds until a token is available; 0 when one is."""
        self._fill(now)
        return max(0.0, 1 - self._tokens) / self._rate_per_s

    def _fill(self, now: float) -> None:
        if self._filled_at_s is not None and now > self._filled_at_s:
            self._tokens = min(float(self._burst), self._tokens + (now - self._filled_at_s) * self._rate_per_s)
        self._filled_at_s = now if self._filled_at_s is None else max(now, self._filled_at_s)
