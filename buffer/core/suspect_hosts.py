"""Which hosts fail significantly more often than the others: they get no orders but a probe. Pure.

Invariant: a host is suspect while the failures in its last `ATTEMPTS` attempts are above those of the other hosts by a
one-sided exact test (Fisher's) at the level `LEVEL`. On one host alone there is nothing to compare with.
"""

from __future__ import annotations

from collections import deque
from math import comb
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ATTEMPTS: Final = 20
LEVEL: Final = 0.01
PROBE_S: Final = 60.0
"""How often a suspect host may get an attempt."""


class HostRecords:
    """How the last attempts on each host ended."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[bool]] = {}
        self._probed_s: dict[str, float] = {}

    def add(self, host: str, *, failed: bool) -> None:
        """One more end; those of unknown hosts say nothing."""
        if host:
            self._ends.setdefault(host, deque(maxlen=ATTEMPTS)).append(failed)

    def suspects(self) -> Mapping[str, str]:
        """Suspect hosts, and why."""
        return {
            host: f"{sum(ends)} of its last {len(ends)} attempts failed"
            for host, ends in self._ends.items()
            if self._is_suspect(host)
        }

    def avoided(self, now: float) -> tuple[str, ...]:
        """The hosts that an attempt beginning now has to avoid; one that is due for a probe is left out once."""
        avoided = []
        for host in self.suspects():
            since_s = now - self._probed_s.setdefault(host, now)
            # A clock that was set back must not put a probe off for hours.
            if 0.0 <= since_s < PROBE_S:
                avoided.append(host)
            else:
                self._probed_s[host] = now
        return tuple(avoided)

    def _is_suspect(self, host: str) -> bool:
        ends = self._ends[host]
        others = [end for other, seen in self._ends.items() if other != host for end in seen]
        return bool(others) and exact_test(sum(ends), len(ends), sum(others), len(others)) < LEVEL


def exact_test(failed: int, attempts: int, others_failed: int, others: int) -> float:
    """Fisher's exact test, one-sided: the chance of at least `failed` of all failures among `attempts`, were all
    attempts alike."""
    failures, whole = failed + others_failed, attempts + others
    most = min(attempts, failures)
    ways = sum(comb(failures, k) * comb(whole - failures, attempts - k) for k in range(failed, most + 1))
    return ways / comb(whole, attempts)
