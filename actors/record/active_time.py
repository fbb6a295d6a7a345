"""The time in which a run was driven: from the start to the end of each driver, without the gaps between them.

Invariants:
- A driver says when it begins, and again when it ends; one that was killed ended, for all that is known, with the last
  sign of life before the next began.
- Spans do not overlap: one process drives a run at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class DrivenTime:
    """Spans of Unix time, oldest first."""

    spans: tuple[tuple[float, float], ...]

    def total_s(self) -> float:
        return sum(ended_s - started_s for started_s, ended_s in self.spans)

    def within_s(self, first_s: float, last_s: float) -> float:
        """Of the time from `first_s` to `last_s`."""
        return sum(max(0.0, min(ended_s, last_s) - max(started_s, first_s)) for started_s, ended_s in self.spans)


def read_driven_time(path: Path, signs_s: Iterable[float]) -> DrivenTime:
    """From `sessions.jsonl`; `signs_s` are times at which something of the run was recorded."""
    ends = dict(_sessions(path))
    signs = sorted(signs_s)
    starts = [*sorted(ends), float("inf")]
    return DrivenTime(tuple((start, ends[start] or _last(signs, start, until)) for start, until in pairwise(starts)))


def _last(signs: Sequence[float], start: float, until: float) -> float:
    """The last sign between two times, the first time without any."""
    place = bisect_left(signs, until)
    return max(start, signs[place - 1]) if place else start


def _sessions(path: Path) -> Iterator[tuple[float, float | None]]:
    """Lines that were torn by a crash are left out."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            session = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(session, dict) and isinstance(session.get("started_s"), float) and "ended_s" in session:
            yield session["started_s"], session["ended_s"]
