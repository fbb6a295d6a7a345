"""Geometry of the page's own drawings: shares of a bar, and histograms. Templates turn it into SVG.

Invariant: numbers only; colours and texts are the templates' and the style sheet's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 1000.0
"""Units of a bar, whatever its width on the screen."""
LEAST: Final = 3.0
"""Units of the smallest part that is drawn."""
HEIGHT: Final = 64.0


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the kind `kind`, which the style sheet colours, in units of the drawing."""

    kind: str
    x: float
    width: float
    y: float = 0.0
    height: float = 0.0


def stacked(parts: Iterable[tuple[str, float]], whole: float) -> list[Box]:
    """Return boxes beside each other, for parts of a whole. Parts that are negative or not finite are left out."""
    boxes, left, scale = [], 0.0, WIDTH / max(whole, 1e-12)
    for kind, value in parts:
        # A comparison with a number that is not one is false.
        if not 0 < value < float("inf"):
            continue
        width = min(max(LEAST, value * scale), WIDTH - left)
        if width > 0:
            boxes.append(Box(kind, left, width))
        left += width
    return boxes


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a histogram: what it counts, how often, and where it stands."""

    label: str
    count: int
    share: float
    box: Box


def histogram(counts: Mapping[int, int]) -> Sequence[Column]:
    """Return a column for each value from the smallest to the largest; of more than 40, the smallest 40."""
    if not counts:
        return ()
    values = range(min(counts), max(counts) + 1)[:40]
    most, total, step = max(counts.values()), max(1, sum(counts.values())), WIDTH / len(values)
    columns = []
    for place, value in enumerate(values):
        count = counts.get(value, 0)
        height = max(1.5, HEIGHT * count / most) if count else 0.0
        box = Box("column", place * step + step * 0.08, step * 0.84, HEIGHT - height, height)
        columns.append(Column(str(value), count, count / total, box))
    return columns
