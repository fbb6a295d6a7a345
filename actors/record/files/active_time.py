"""Time during which a run was driven: from the start to the end of each driver process, without the gaps in between.

Invariants:
- A driver records its start and its end. A driver that was killed is assumed to have ended at the last record before
  the next driver started.
- Spans do not overlap: one process drives a run at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import orjson


@dataclass(frozen=True, slots=True)
class DrivenTime:
    """Spans of Unix time in which the run was driven, oldest first."""

    spans: tuple[tuple[float, float], ...]

    def total_s(self) -> float:
        """Return the sum of all spans, in seconds."""
        return sum(ended_s - started_s for started_s, ended_s in self.spans)

    def within_s(self, first_s: float, last_s: float) -> float:
        """Return the driven time between `first_s` and `last_s`."""
        return sum(max(0.0, min(ended_s, last_s) - max(started_s, first_s)) for started_s, ended_s in self.spans)


def read_driven_time(path: Path, signs_s: Iterable[float]) -> DrivenTime:
    """Read the spans from `sessions.jsonl`; `signs_s` are times at which the run recorded something."""
    ends, signs, spans = dict(_sessions(path)), sorted(signs_s), []
    for start, until in pairwise([*sorted(ends), float("inf")]):
        place = bisect_left(signs, until)
        last_sign = max(start, signs[place - 1]) if place else start
        spans.append((start, ends[start] or last_sign))
    return DrivenTime(tuple(spans))


def _sessions(path: Path) -> Iterator[tuple[float, float | None]]:
    """Yield start and end of each driver; the end is None while it is unknown. Lines torn by a crash are skipped."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            session = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(session, dict) and isinstance(session.get("started_s"), float) and "ended_s" in session:
            yield session["started_s"], session["ended_s"]
