"""Causes that lie in time: windows of a run in which a part held rollouts up, and levels that rose for good.

Invariants:
- Order and place in time are those of a part's phase, which a longer part does not move.
- A window counts as one of all windows that the run has, a level as one of all its times: what was picked because it
  stands out has to stand out from all that could have been picked.
- One group of rollouts is no window, however many members it has: they were issued together, at one task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.actors.telemetry.slow.samples import robust_deviation

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]

MOST_WINDOWS: Final = 4
"""Windows that are looked for in one part."""
SHARES: Final = (0.2, 0.5, 0.9)
"""Shares of slow rollouts within a window that are tried."""
BLOCKS: Final = 32
"""Pieces of a run, of equal numbers of rollouts, whose medians show a level ..."""
LEAST_BLOCK: Final = 8
"""... unless a piece would have fewer rollouts than this."""
LEAST_BLOCKS: Final = 2
"""Pieces before and after a change."""
RISE: Final = 0.5
"""A level rose if its median did by this share of a typical rollout before, ..."""
OUTLYING: Final = 6.0
"""... by this many robust standard deviations, here of the pieces, ..."""
ABRUPT: Final = 0.5
"""... and by this share of it from the pieces just before to those just after: slow growth is no event."""


@dataclass(frozen=True, slots=True)
class Window:
    """The rollouts whose phase of a part began within a stretch of the run, and the time of the part in the slow ones
    among them, in Unix seconds (`common_time`)."""

    places: Places
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Level:
    """A part took `before_s` (median) until `begin_s` (Unix time), and `after_s` from then on."""

    begin_s: float
    before_s: float
    after_s: float


def time_text(begin_s: float, end_s: float | None = None) -> str:
    """Return a time, or the two ends of a window, in words."""
    begin = datetime.fromtimestamp(begin_s, UTC)
    if end_s is None:
        return f"{begin:%Y-%m-%d %H:%M:%S} UTC"
    end = datetime.fromtimestamp(end_s, UTC)
    return f"{begin:%Y-%m-%d %H:%M:%S} to {end:{'%H:%M:%S' if end.date() == begin.date() else '%Y-%m-%d %H:%M:%S'}} UTC"


def windows(
    begin_s: Floats, extent_s: tuple[Floats, Floats], slow: Flags, population: Flags, groups: Places
) -> Iterator[Window]:
    """Yield the windows in which slow rollouts crowd most, each without those of the windows before it. All arguments
    have one value for each rollout: the begin of the part's phase, begin and end of the part itself, whether the part
    held it up, whether it counts, and its group."""
    order = np.nonzero(population)[0]
    order = order[np.argsort(begin_s[order], kind="stable")]
    for _ in range(MOST_WINDOWS):
        marks = slow[order]
        rate = float(marks.mean()) if len(marks) else 0.0
        best: tuple[float, int, int] | None = None
        for share in SHARES:
            if not 0 < rate < share / 2:
                continue
            gains = np.where(marks, np.log(share / rate), np.log((1 - share) / (1 - rate)))
            sums = np.concatenate(([0.0], np.cumsum(gains)))
            lows = np.minimum.accumulate(sums[:-1])
            last = int(np.argmax(sums[1:] - lows))
            first = int(np.argmin(sums[: last + 1]))
            gain = float(sums[last + 1] - sums[first])
            if best is None or gain > best[0]:
                best = gain, first, last + 1
        if best is None:
            return
        inside = order[best[1] : best[2]]
        held = inside[slow[inside]]
        if len(np.unique(groups[held])) > 1:
            yield Window(np.sort(inside), *common_time(extent_s[0][held], extent_s[1][held]))
        order = np.concatenate((order[: best[1]], order[best[2] :]))


def common_time(begin_s: Floats, end_s: Floats) -> tuple[float, float]:
    """Return the time of some intervals: all of it if they follow each other for longer than two of them last, else
    that in which at least half as many overlap as ever do, since one moment held them all up."""
    first_s, last_s = float(begin_s.min()), float(end_s.max())
    if float(begin_s.max()) - first_s > 2 * float(np.median(end_s - begin_s)):
        return first_s, last_s
    at_s = np.concatenate((begin_s, end_s))
    change = np.concatenate((np.ones(len(begin_s)), -np.ones(len(end_s))))
    order = np.lexsort((-change, at_s))
    at_s, count = at_s[order], np.cumsum(change[order])
    crowded = np.nonzero(count >= count.max() / 2)[0]
    return float(at_s[crowded[0]]), float(at_s[min(crowded[-1] + 1, len(at_s) - 1)])


def level(begin_s: Floats, seconds: Floats, total_s: Floats) -> Level | None:
    """Return the level to which a part rose for good, if it did. `begin_s` are the begins of its phase in rollouts that
    ended by themselves, `seconds` what it took in them, and `total_s` their whole times, all of shape (rollouts,)."""
    blocks = min(BLOCKS, len(seconds) // LEAST_BLOCK)
    if blocks < 2 * LEAST_BLOCKS:
        return None
    order = np.argsort(begin_s, kind="stable")
    pieces = np.array_split(order, blocks)
    medians = np.array([np.median(seconds[piece]) for piece in pieces])

    def rest_s(split: int) -> float:
        """Return what the medians of both sides leave unexplained."""
        return float(sum(np.abs(side - np.median(side)).sum() for side in (medians[:split], medians[split:])))

    split = min(range(LEAST_BLOCKS, blocks - LEAST_BLOCKS + 1), key=rest_s)
    before, after = medians[:split], medians[split:]
    before_s, after_s = float(np.median(before)), float(np.median(after))
    rise_s, typical_s = after_s - before_s, float(np.median(total_s[np.concatenate(pieces[:split])]))
    rest = np.concatenate((before - before_s, after - after_s))
    near_s = float(np.median(after[:3]) - np.median(before[-3:]))
    enough = max(RISE * typical_s, OUTLYING * float(robust_deviation(rest)))
    if rise_s < enough or near_s < ABRUPT * rise_s or np.quantile(after, 0.1) <= np.quantile(before, 0.9):
        return None
    # The piece in which it rose has rollouts of both sides: it began with the first of many that took long.
    around = np.concatenate((pieces[split - 1], pieces[split]))
    high = seconds[around] > before_s + rise_s / 2
    score = np.cumsum(np.where(high, 1, -1)[::-1])[::-1]
    return Level(float(begin_s[around[int(np.argmax(score))]]), before_s, after_s)
