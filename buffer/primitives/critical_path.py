"""The critical path through intervals that may overlap: which of them held up the end, and when.

Invariants:
- The returned segments do not overlap, are in order, and cover exactly the time between start and end.
- Their times are those of the intervals' own clock; intervals outside of the time are cut, and reversed ones ignored.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice, pairwise
from typing import Final, NamedTuple

ADJACENT_S: Final = 1e-4
"""An interval that ended at most this long before another began led to it."""


class Segment(NamedTuple):
    """A part of the time from `start_s` to `end_s`, in seconds. `turn` is the number of the agent's turn to which it
    belongs, from 1; 0 if it belongs to none. `detail` tells segments of one part apart."""

    part: str
    start_s: float
    end_s: float
    turn: int = 0
    detail: str = ""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def at(self, start_s: float, end_s: float) -> Segment:
        """Return the same segment at another time."""
        # `_replace` takes four times as long, and each attempt has hundreds.
        return Segment(self.part, start_s, end_s, self.turn, self.detail)

    def moved(self, by_s: float) -> Segment:
        """Return the same segment `by_s` seconds later."""
        return self.at(self.start_s + by_s, self.end_s + by_s)


def critical_path(intervals: Iterable[Segment], start_s: float, end_s: float, *, idle: str) -> list[Segment]:
    """Return the critical path from `start_s` to `end_s`, followed backwards from the end: before an interval on the
    path comes the one that ended last before it began; where none ended, one that was still running. Time without any
    interval is `idle`. Turns and details are left out."""
    cut = [
        Segment(each.part, max(each.start_s, start_s), min(each.end_s, end_s))
        for each in intervals
        if each.end_s > start_s and each.start_s < end_s and each.end_s > each.start_s
    ]
    by_end = sorted(cut, key=lambda each: (each.end_s, each.start_s))
    ends = [each.end_s for each in by_end]
    # Of the intervals from each place on, the one that began first: it runs at a time if any of them does.
    first_begun: list[Segment | None] = [None] * (len(by_end) + 1)
    for place in reversed(range(len(by_end))):
        following = first_begun[place + 1]
        earlier = following is not None and following.start_s <= by_end[place].start_s
        first_begun[place] = following if earlier else by_end[place]
    path: list[Segment] = []
    now = end_s
    while now > start_s:
        ended = bisect_right(ends, now)
        last = by_end[ended - 1] if ended else None
        if last is None or now - last.end_s > ADJACENT_S:
            running = first_begun[ended]
            if running is not None and running.start_s < now:
                # Up to its start, or to the end of what ended meanwhile.
                begin = max(running.start_s, last.end_s if last is not None else start_s)
                path.append(Segment(running.part, begin, now))
                now = begin
                continue
            gap_start = start_s if last is None else last.end_s
            path.append(Segment(idle, gap_start, now))
            now = gap_start
            continue
        path.append(Segment(last.part, last.start_s, now))
        now = last.start_s
    return _joined(reversed(path))


def innermost(intervals: Iterable[Segment], start_s: float, end_s: float, *, idle: str) -> list[Segment]:
    """Return the path on which at each time the interval counts that began last among those that cover it: of nested
    intervals the innermost. Time without any interval is `idle`."""
    cut = [each.at(max(each.start_s, start_s), min(each.end_s, end_s)) for each in intervals]
    begun = sorted((each for each in cut if each.end_s > each.start_s), key=lambda each: (each.start_s, -each.end_s))
    times = sorted({start_s, end_s, *(time for each in begun for time in (each.start_s, each.end_s))})
    path: list[Segment] = []
    open_: list[tuple[float, int, Segment]] = []
    following = 0
    for time_s, next_s in pairwise(times):
        while following < len(begun) and begun[following].start_s <= time_s:
            # The number decides between equal starts: the shorter, inner one comes later.
            heappush(open_, (-begun[following].start_s, -following, begun[following]))
            following += 1
        while open_ and open_[0][2].end_s <= time_s:
            heappop(open_)
        covering = open_[0][2] if open_ else Segment(idle, time_s, next_s)
        path.append(covering.at(time_s, next_s))
    return _joined(path)


def overlaid(path: Sequence[Segment], over: Sequence[Segment]) -> list[Segment]:
    """Return the path with the parts of `over` in their time. Both are in order and without overlaps."""
    result: list[Segment] = []
    first = 0
    for segment in path:
        now = segment.start_s
        while first < len(over) and over[first].end_s <= now:
            first += 1
        for each in islice(over, first, None):
            if each.start_s >= segment.end_s:
                break
            begin, end = max(each.start_s, now), min(each.end_s, segment.end_s)
            result += [segment.at(now, begin), each.at(begin, end)]
            now = end
        result.append(segment.at(now, segment.end_s))
    return _joined(each for each in result if each.end_s > each.start_s)


def _joined(segments: Iterable[Segment]) -> list[Segment]:
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        same = last is not None and (last.part, last.turn, last.detail) == (segment.part, segment.turn, segment.detail)
        if last is not None and same and segment.start_s <= last.end_s + ADJACENT_S:
            joined[-1] = last.at(last.start_s, segment.end_s)
        else:
            joined.append(segment)
    return joined
