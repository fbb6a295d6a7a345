"""Common factors: which label, or which event of the run, slow rollouts share more often than chance explains.

Every value of every label, and every kind of event, is tested against each cause with the one-sided exact test of
Fisher. The Benjamini-Yekutieli procedure, which holds for dependent tests, keeps the false discovery rate over all
tests of a run at `FALSE_DISCOVERIES`.

Invariants:
- A factor has at least `LEAST_SUPPORT` slow rollouts and is at least `LEAST_LIFT` times as frequent among them.
- Labels that only restate a cause (tool names beside slow tools) are not tested against it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.actors.slowness.advice import stage_of
from headrace.actors.slowness.rows import EARLIER_ATTEMPTS
from headrace.buffer.breakdown import TOOL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.actors.slowness.rows import Interval, RolloutTime

FALSE_DISCOVERIES: Final = 0.01
LEAST_SUPPORT: Final = 3
LEAST_LIFT: Final = 2.0
HIGH: Final = 0.9
"""A number counts as high above this quantile over the run."""
NUMBERS: Final = ("turns", "prompt_tokens", "sampled_tokens", "cached_tokens", "memory_bytes")
COUNTS: Final = ("boot_tries", "retractions")
"""Numbers that are usually 1 or 0; they also count as high only above that."""
UNTESTED: Final = frozenset({*NUMBERS, *COUNTS, "cpu_s", "versions", "agent", "sandbox"})
"""Labels whose single values are not tested: numbers, and ids that no two rollouts share."""
CPU_SHARE: Final = 0.1
"""CPU seconds per second of tools and checks count as low below this quantile and below half of the median."""
LAST: Final = ("cpu_share", "failed_on")
"""Kinds of factors that follow from others: named only where nothing else is found."""
NEAREST: Final[Mapping[str, tuple[str, ...]]] = {
    "boot": ("evaluation", "image", "host"),
    "engine": ("engines", "evaluation", "push"),
    "gate": ("push", "quarantine"),
    "tool": ("task", "host"),
    "evaluate": ("task", "host"),
}
"""Kinds of factors that explain a stage best, for factors that the same rollouts have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A factor of one cause. `support` of `slow` rollouts have it; `lift` is their share divided by that among all
    rollouts; `p` is the probability of as many by chance."""

    kind: str
    value: str
    support: int
    slow: int
    lift: float
    p: float

    def text(self) -> str:
        return self.kind if not self.value else f"{self.kind} {self.value}"


Carriers = dict[tuple[str, str], set[int]]


def carriers_of(rows: Sequence[RolloutTime]) -> Carriers:
    """Return the places of the rollouts that have each (label, value)."""
    found: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    numbers: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for place, row in enumerate(rows):
        for name, value in row.labels.items():
            if isinstance(value, (tuple, list)):
                if name not in UNTESTED:
                    for each in value:
                        found[name, str(each)].add(place)
            elif isinstance(value, (bool, str)):
                if name not in UNTESTED and value != "":
                    found[name, str(value).lower() if isinstance(value, bool) else value].add(place)
            elif name in NUMBERS or name in COUNTS:
                numbers[name][place] = float(value)
        busy_s = sum(seconds for part, seconds in row.parts_s.items() if part.startswith(TOOL))
        cpu_s = row.labels.get("cpu_s")
        if isinstance(cpu_s, (int, float)) and busy_s > 0:
            numbers["cpu_share"][place] = cpu_s / busy_s
    for name, values in numbers.items():
        known = np.fromiter(values.values(), dtype=np.float64)
        if name == "cpu_share":
            limit = min(float(np.quantile(known, CPU_SHARE)), float(np.median(known)) / 2)
            found[name, "low"] = {place for place, value in values.items() if value <= limit}
            continue
        usual = {"boot_tries": 1.0, "retractions": 0.0}.get(name, 0.0)
        limit = max(float(np.quantile(known, HIGH)), usual)
        if name in COUNTS:
            # Most rollouts have the usual count, so the quantile may be that of a common one.
            limit = usual
        found[name, f"above {limit:g}"] = {place for place, value in values.items() if value > limit}
    return {key: places for key, places in found.items() if 0 < len(places) < len(rows)}


def beside(rows: Sequence[RolloutTime], part: str, meanwhile: Iterable[Interval]) -> Carriers:
    """Return the places of the rollouts of which this part may have coincided with each kind of event."""
    by_kind: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for interval in meanwhile:
        by_kind[interval.kind].append((interval.start_s, interval.end_s))
    found: Carriers = {}
    merged = {kind: disjoint(spans) for kind, spans in by_kind.items()}
    windows = [row.window_s(part) for row in rows]
    # A rollout that takes longer coincides with more events because it takes longer, so all windows are cut alike.
    typical_s = float(np.median([end_s - start_s for start_s, end_s in windows])) if windows else 0.0
    windows = [(start_s, min(end_s, start_s + typical_s)) for start_s, end_s in windows]
    for kind, spans in merged.items():
        starts, ends = [start for start, _ in spans], [end for _, end in spans]
        places = {
            place
            for place, (start_s, end_s) in enumerate(windows)
            if bisect_right(starts, end_s) > bisect_left(ends, start_s)
        }
        if 0 < len(places) < len(rows):
            found[kind, ""] = places
    return found


def common_factors(
    rows: Sequence[RolloutTime], slow_by_part: Mapping[str, set[int]], meanwhile: Sequence[Interval]
) -> dict[str, list[tuple[Factor, set[int]]]]:
    """Return the factors of each part with the rollouts that have them, the most convincing first."""
    labels = carriers_of(rows)
    tested: list[tuple[float, str, Factor, set[int]]] = []
    tests = 0
    for part, slow in slow_by_part.items():
        if len(slow) < LEAST_SUPPORT:
            continue
        carriers = labels | beside(rows, part, meanwhile)
        for (kind, value), places in carriers.items():
            # These restate the cause.
            if (kind == "tools" and part.startswith(TOOL)) or (kind == "failed_by" and part == EARLIER_ATTEMPTS):
                continue
            tests += 1
            support = len(places & slow)
            lift = (support / len(slow)) / (len(places) / len(rows))
            if support < LEAST_SUPPORT or lift < LEAST_LIFT:
                continue
            p = upper_tail(len(rows), len(places), len(slow), support)
            factor = Factor(kind=kind, value=value, support=support, slow=len(slow), lift=lift, p=p)
            tested.append((p, part, factor, places))
    tested.sort(key=lambda item: item[0])
    limit = FALSE_DISCOVERIES / sum(1 / number for number in range(1, tests + 1)) if tests else 0.0
    kept = max((place for place, item in enumerate(tested, start=1) if item[0] <= limit * place / tests), default=0)
    found: defaultdict[str, list[tuple[Factor, set[int]]]] = defaultdict(list)
    for _, part, factor, places in tested[:kept]:
        found[part].append((factor, places))
    for part, factors in found.items():
        nearest = NEAREST.get(stage_of(part), ())
        # Nearly equal evidence comes from labels that the same rollouts have.
        factors.sort(
            key=lambda item: (
                item[0].kind in LAST,
                round(math.log10(max(item[0].p, 1e-300))),
                nearest.index(item[0].kind) if item[0].kind in nearest else len(nearest),
                item[0].p,
            )
        )
    return dict(found)


def upper_tail(total: int, marked: int, drawn: int, hits: int) -> float:
    """Return P(X >= hits) for `drawn` of `total` without replacement, `marked` of which count."""
    scale = _log_choose(total, drawn)
    return min(
        1.0,
        sum(
            math.exp(_log_choose(marked, k) + _log_choose(total - marked, drawn - k) - scale)
            for k in range(hits, min(marked, drawn) + 1)
            if drawn - k <= total - marked
        ),
    )


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def disjoint(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint spans in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
