"""Two rollouts, or two ranges of steps, side by side: `headrace trace show`.

Invariant: a range is compared by medians over its rollouts that ended by themselves; a rollout by its own seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Final

from headrace.actors.errors import ConfigError
from headrace.actors.telemetry.slow.rows import RolloutTime, RunTimes, in_order
from headrace.actors.telemetry.slow.terminal_text import place_of_rollout, printable, shown

RANGE: Final = re.compile(r"(\d+)-(\d+)")
NAME: Final = 24
VALUE: Final = 34
"""Characters of a name of a part or label, and of a label's value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPart:
    """Median seconds of one part on both sides, over the rollouts that spent time in it, and their numbers `n`. The
    difference is that of the medians over all rollouts of each side: a part that few spend time in adds little."""

    part: str
    a_p50_s: float
    a_n: int
    b_p50_s: float
    b_n: int
    difference_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both sides in words, their numbers of rollouts, their parts, and the value of each label on both sides."""

    a: str
    b: str
    a_rollouts: int
    b_rollouts: int
    total: ComparedPart
    parts: tuple[ComparedPart, ...]
    labels: Mapping[str, tuple[str, str]]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the comparison as lines for a terminal."""
        lines = [
            f"A: {self.a}",
            f"B: {self.b}",
            f"{'':{NAME}} {'A p50 s':>12} {'n':>6} {'B p50 s':>12} {'n':>6} {'B - A':>12}",
        ]
        lines += [
            f"{each.part[:NAME]:{NAME}} {each.a_p50_s:12.3f} {each.a_n:6} {each.b_p50_s:12.3f} {each.b_n:6} "
            f"{each.difference_s:+12.3f}"
            for each in (*self.parts, self.total)
        ]
        for name, (one, other) in self.labels.items():
            differs = "" if one == other else "  differs"
            lines.append(f"{name[:NAME]:{NAME}} {one[:VALUE]:{VALUE}} {other[:VALUE]:{VALUE}}{differs}".rstrip())
        return [printable(line) for line in lines]


def compare(times: RunTimes, a: str, b: str) -> Comparison:
    """Compare two rollouts (ids, or unambiguous beginnings of them), or two ranges of steps (`100-150`, both ends
    included; the step of a rollout is that of the version at which it was issued). Raises ConfigError."""
    if bool(RANGE.fullmatch(a)) != bool(RANGE.fullmatch(b)):
        raise ConfigError(f"{a} and {b}: name two rollouts, or two ranges of steps such as 100-150")
    (name_a, some), (name_b, others) = side_of(times, a), side_of(times, b)
    parts = sorted({part for row in (*some, *others) for part in row.parts_s}, key=in_order)
    names = dict.fromkeys(name for row in (*some, *others) for name in row.labels)
    return Comparison(
        a=name_a,
        b=name_b,
        a_rollouts=len(some),
        b_rollouts=len(others),
        total=_compared("total", [row.total_s for row in some], [row.total_s for row in others]),
        parts=tuple(
            _compared(part, *([row.parts_s.get(part, 0.0) for row in side] for side in (some, others)))
            for part in parts
        ),
        labels={name: (_common(some, name), _common(others, name)) for name in names},
    )


def side_of(times: RunTimes, name: str) -> tuple[str, Sequence[RolloutTime]]:
    """Return the rollouts of a side, and what it is in words. Raises ConfigError."""
    if (steps := RANGE.fullmatch(name)) is None:
        row = times.rows[place_of_rollout(times, name)]
        running = ", still running" if row.ended_at_s is None else ""
        return f"rollout {row.rollout_id} attempt {row.attempt}, task {row.task}, step {row.step}{running}", [row]
    first, last = int(steps[1]), int(steps[2])
    if first > last:
        raise ConfigError(f"{name}: the first step is above the last; write {last}-{first}")
    rows = [row for row in times.rows if first <= row.step <= last and row.finished]
    if not rows:
        known = [row.step for row in times.rows if row.finished]
        there = f"those that ended were issued at steps {min(known)} to {max(known)}" if known else "none has ended"
        raise ConfigError(f"{name}: no rollout of these steps has ended; {there}")
    return f"{len(rows)} rollouts of steps {first} to {last}", rows


def _compared(part: str, some: Sequence[float], others: Sequence[float]) -> ComparedPart:
    a, b = ([seconds for seconds in side if seconds > 0] for side in (some, others))
    return ComparedPart(
        part=part,
        a_p50_s=median(a) if a else 0.0,
        a_n=len(a),
        b_p50_s=median(b) if b else 0.0,
        b_n=len(b),
        difference_s=median(others) - median(some),
    )


def _common(rows: Sequence[RolloutTime], name: str) -> str:
    """Return a label's value as text: of several rollouts the median of numbers, or the most frequent value and its
    share."""
    values = [row.labels[name] for row in rows if name in row.labels]
    if not values:
        return "-"
    if len(rows) > 1 and all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return f"{median(float(value) for value in values if isinstance(value, (int, float))):g}"
    ((text, count), *_) = Counter(shown(value) for value in values).most_common(1)
    return text if count == len(rows) else f"{text} ({count / len(rows):.0%})"
