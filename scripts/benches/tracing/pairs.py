"""Alternated pairs: the same measurement with and without something, in turn, so that a slow moment of the machine
affects both.

Invariant: pairs begin in turn with and without, so that a trend within a pair cancels over the pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median


@dataclass(slots=True)
class Pairs:
    """Figures of alternated pairs, in the order of the pairs."""

    on: list[float] = field(default_factory=list)
    off: list[float] = field(default_factory=list)

    def add(self, figure: float, *, on: bool) -> None:
        (self.on if on else self.off).append(figure)

    @property
    def ratio(self) -> float:
        """Median over the pairs of the figure with over that without."""
        return median(on / off for on, off in zip(self.on, self.off, strict=True))

    @property
    def overhead(self) -> float:
        """The same as a share of the figure without; negative if it was smaller with."""
        return self.ratio - 1

    @property
    def off_spread(self) -> float | None:
        """Median difference between one figure without and the next, as a share; None with one pair only. A smaller
        overhead than this in one pair means nothing."""
        changes = [abs(later / earlier - 1) for earlier, later in pairwise(self.off)]
        return median(changes) if changes else None

    def to_json(self) -> dict[str, object]:
        """Return all figures."""
        ratios = [on / off for on, off in zip(self.on, self.off, strict=True)]
        return {"on": self.on, "off": self.off, "ratios": ratios, "off_spread": self.off_spread}


def alternated(pairs: int) -> Iterator[bool]:
    """Yield whether to measure with (True) or without, twice for each pair."""
    for number in range(pairs):
        yield from (number % 2 == 0, number % 2 == 1)
