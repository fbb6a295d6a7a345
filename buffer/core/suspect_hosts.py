"""Detection of hosts that fail significantly more often than the others; such hosts get only probes. Pure.

Invariant: a host is suspect while it has failed significantly more often in its last `ATTEMPTS` attempts than the other
hosts in theirs, by Fisher's one-sided exact test at the level `LEVEL`. A single host is never suspect.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import comb
from typing import Final

ATTEMPTS: Final = 20
LEVEL: Final = 0.01
PROBE_S: Final = 60.0
"""Time between attempts on a suspect host."""


class HostRecords:
    """Ends of the last attempts on each host."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[bool]] = {}
        self._probed_s: dict[str, float] = {}

    def add(self, host: str, *, failed: bool) -> None:
        """Add the end of an attempt; ends on unknown hosts are ignored."""
        if host:
            self._ends.setdefault(host, deque(maxlen=ATTEMPTS)).append(failed)

    def suspects(self) -> Mapping[str, str]:
        """Return the suspect hosts, with the reason for each."""
        suspects = {}
        for host, ends in self._ends.items():
            others = [end for other, seen in self._ends.items() if other != host for end in seen]
            if others and exact_test(sum(ends), len(ends), sum(others), len(others)) < LEVEL:
                suspects[host] = f"{sum(ends)} of its last {len(ends)} attempts failed"
        return suspects

    def avoided(self, now: float) -> tuple[str, ...]:
        """Return the hosts that an attempt beginning now must avoid. A host that is due for a probe is left out of
        the result once."""
        avoided = []
        for host in self.suspects():
            since_s = now - self._probed_s.setdefault(host, now)
            # A clock that was set back must not put a probe off for hours.
            if 0.0 <= since_s < PROBE_S:
                avoided.append(host)
            else:
                self._probed_s[host] = now
        return tuple(avoided)


def exact_test(failed: int, attempts: int, others_failed: int, others: int) -> float:
    """Return the p-value of Fisher's exact test, one-sided: the probability that at least `failed` of all failures are
    among `attempts`, if all hosts are equally likely to fail."""
    failures, whole = failed + others_failed, attempts + others
    most = min(attempts, failures)
    ways = sum(comb(failures, k) * comb(whole - failures, attempts - k) for k in range(failed, most + 1))
    return ways / comb(whole, attempts)
