"""Common factors: which label, event or window of the run slow rollouts share more often than chance explains.

Every value of every label, every kind of event, and the windows in which slow rollouts crowd, are tested against each
cause with the one-sided exact test of Fisher. The Benjamini-Yekutieli procedure, which holds for dependent tests, keeps
the false discovery rate over all tests of a run at `FALSE_DISCOVERIES`. Labels that stand out are also tested window by
window: an engine may have been slow for a while.

Invariants:
- A factor has at least `LEAST_SUPPORT` slow rollouts of `LEAST_GROUPS` groups, and its rollouts are slow at least
  `LEAST_RATIO` times as often as the others. (A lift cannot serve as this bound: that of a factor of half of all
  rollouts is at most 2.)
- Compared are rollouts that ended by themselves: of others neither the labels nor the times are complete.
- An event counts for a rollout only if it coincided for long enough to explain half of a usual excess, and for a run
  only if it held rollouts up in more than one moment.
- A factor that the rollouts of a stronger one explain is not reported; one that has the same rollouts is named with it.
- Labels that only restate a cause (tool names beside slow tools) are not tested against it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from types import NoneType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.actors.telemetry.slow.advice import stage_of
from headrace.actors.telemetry.slow.cohort import Cohorts
from headrace.actors.telemetry.slow.moments import Level, time_text, windows
from headrace.actors.telemetry.slow.rows import EARLIER_ATTEMPTS, Interval, RolloutTime
from headrace.buffer.trajectories.breakdown import TOOL, Label

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Flags = NDArray[np.bool_]

FALSE_DISCOVERIES: Final = 0.01
LEAST_SUPPORT: Final = 3
LEAST_GROUPS: Final = 2
"""The members of a group are issued together, so what slowed one group may be its moment as well as its labels."""
LEAST_RATIO: Final = 2.0
SHARE_OF_EXCESS: Final = 0.5
"""An event coincides with a rollout if it may have held it up for this share of the median excess of slow ones."""
LONG: Final = "long"
"""Mark of rollouts with which an event coincided for longer than is usual."""
HIGH: Final = 0.9
"""A number counts as high above this quantile over the run."""
NUMBERS: Final = ("turns", "prompt_tokens", "sampled_tokens", "cached_tokens", "memory_bytes")
COUNTS: Final[Mapping[str, float]] = {"boot_tries": 1.0, "retractions": 0.0}
"""Numbers that nearly all rollouts have in common; they count as high above that."""
WAITED: Final = "cpu_waited_s"
"""Label with the seconds for which a sandbox had work and got no CPU: throttled, or behind others."""
UNTESTED: Final = frozenset(
    {*NUMBERS, *COUNTS, WAITED, "cpu_s", "load", "versions", "agent", "sandbox", "trained_tokens", "masked"}
)
"""Labels whose single values are not tested: numbers, and ids that no two rollouts share."""
READ: Final = frozenset({*NUMBERS, *COUNTS, WAITED})
STARVED: Final = "starved"
STARVED_SHARE: Final = 0.25
"""A sandbox was starved of CPU if it waited for it this share of the time of its tools. Little CPU time alone says
nothing: a tool may wait for a network."""
AFTER, WINDOW = "after", "window"
"""Kinds of factors in time: everything after a level rose, and a window of the run."""
ALONE: Final = 0.01
"""A label is looked at window by window if it has at most this probability by itself. An event is a factor only if it
has at most this probability without the window in which slow rollouts crowd most: one bad moment is one observation,
however many rollouts it held up."""
COVERED: Final = 0.7
"""Share of a window's slow rollouts that have to have met an event that explains it."""
NEAR: Final = 10.0
"""Factors whose probabilities differ by less than this ratio are equally convincing."""
LAST: Final = (STARVED, "failed_on")
"""Kinds of factors that follow from others: named only where nothing else is found."""
NEAREST: Final[Mapping[str, tuple[str, ...]]] = {
    "boot": ("evaluation", "image", "host"),
    "engine": ("engines", "evaluation", "push"),
    "gate": ("push", "quarantine"),
    "tool": ("task", "host"),
    "evaluate": ("task", "host"),
    "retries": ("task", "host"),
    "gateway": ("gateway", "node"),
}
"""Kinds of factors that explain a stage best, for factors that are equally convincing."""
DIRECT: Final[Mapping[str, tuple[str, ...]]] = {"gate": ("push", "quarantine", "outage")}
"""Kinds of factors that are a stage by its definition: named first, however convincing others are. A gate is closed by
a push; that an evaluation ran at the same times explains nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """A factor of one cause. `support` of `slow` rollouts have it; `lift` is their share divided by that among all
    rollouts; `p` is the probability of as many by chance. `same` are factors that exactly the same rollouts have, so
    that nothing tells them apart. A factor in time has `begin_s` and, if it ended, `end_s`, in Unix time; a label that
    has them too is a factor within that window only."""

    kind: str
    value: str
    support: int
    slow: int
    lift: float
    p: float
    same: tuple[str, ...] = ()
    begin_s: float | None = None
    end_s: float | None = None

    def text(self) -> str:
        when = "" if self.begin_s is None else time_text(self.begin_s, self.end_s)
        return " ".join(word for word in (self.kind, self.value, when) if word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The rollouts that a part held up, and the seconds by which it did. Of all rollouts: `spent_s` in the part,
    `begin_s` and `end_s` of its phase, and begin and end of the part itself (`extent_s`). `level` is the part's, if it
    rose."""

    places: Places
    excess_s: Floats
    spent_s: Floats
    begin_s: Floats
    end_s: Floats
    extent_s: tuple[Floats, Floats]
    level: Level | None = None


Carriers = dict[tuple[str, str], "Places"]


def carriers_of(rows: Sequence[RolloutTime], tool_s: Floats) -> Carriers:
    """Return the places of the rollouts that have each (label, value), without values that too few rollouts have to be
    a factor. `tool_s` are the seconds of tools of each rollout."""
    given = dict.fromkeys(chain.from_iterable(dict.fromkeys(tuple(row.labels) for row in rows)))
    names = tuple(name for name in given if name in READ or name not in UNTESTED)
    # Row by row: there are far more rows than the processor's caches hold.
    columns = dict(zip(names, zip(*(map(row.labels.get, names) for row in rows), strict=True), strict=True))
    carriers: Carriers = {}
    for name, values in columns.items():
        if name in NUMBERS or name in COUNTS:
            carriers |= high_places(name, _numbers(values))
        elif name != WAITED:
            carriers |= {(name, value): places for value, places in places_by_value(values).items()}
    waited_s = _numbers(columns.get(WAITED, [None] * len(rows)))
    carriers[STARVED, ""] = np.nonzero((tool_s > 0) & (waited_s >= STARVED_SHARE * tool_s))[0]
    # Where all ran on one host, that attempts failed there says no more than that they failed.
    hosts = {value for kind, value in carriers if kind in ("host", "failed_on")}
    told = {key: places for key, places in carriers.items() if key[0] != "failed_on" or len(hosts) > 1}
    return {key: places for key, places in told.items() if len(places) >= LEAST_SUPPORT}


def _numbers(values: Sequence[Label | None]) -> Floats:
    """Return values as numbers; NaN where there is none."""
    if not {*map(type, values)} <= {int, float, bool, NoneType}:
        values = [each if isinstance(each, (int, float)) else math.nan for each in values]
    return np.array(values, dtype=np.float64)


def high_places(name: str, values: Floats) -> Carriers:
    """Return the places at which a number is high."""
    known = values[np.isfinite(values)]
    if not known.size:
        return {}
    # Most rollouts have the usual count, so the quantile may be that of a common one.
    limit = COUNTS[name] if name in COUNTS else float(np.quantile(known, HIGH))
    return {(name, f"above {limit:g}"): np.nonzero(values > limit)[0]}


def places_by_value(values: Sequence[Label | None]) -> dict[str, Places]:
    """Return the places of each text, of each flag, and of each member of a list."""
    keys: Sequence[object] = values
    if list in {*map(type, values)}:
        keys = [tuple(each) if isinstance(each, list) else each for each in values]
    codes = {key: code for code, key in enumerate(dict.fromkeys(keys))}
    at = np.fromiter(map(codes.__getitem__, keys), dtype=np.int64, count=len(keys))
    order = np.argsort(at, kind="stable")
    begins = np.searchsorted(at[order], np.arange(len(codes)))
    found: defaultdict[str, list[Places]] = defaultdict(list)
    for value, places in zip(codes, np.split(order, begins[1:]), strict=True):
        if isinstance(value, bool):
            found[str(value).lower()].append(places)
        elif isinstance(value, (str, tuple)):
            for each in dict.fromkeys(value if isinstance(value, tuple) else [value]):
                if each != "":
                    found[str(each)].append(places)
    return {value: np.sort(np.concatenate(some)) for value, some in found.items()}


def beside(held: Held, meanwhile: Iterable[Interval]) -> Carriers:
    """Return the places of the rollouts of which a part may have coincided with each kind of event: at all, and for
    `SHARE_OF_EXCESS` longer than is usual.

    An event coincides if it was running when the part's phase began, or began within the usual time of the phase, which
    is the same for all rollouts: one that took longer does not coincide with more events because of that. It counts
    from the beginning of the phase to its own end."""
    by_kind: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for interval in meanwhile:
        by_kind[interval.kind].append((interval.start_s, interval.end_s))
    begin_s = held.begin_s
    end_s = begin_s + max(0.0, np.median(held.end_s - begin_s - held.spent_s) + np.median(held.spent_s))
    least_s = SHARE_OF_EXCESS * float(np.median(held.excess_s))
    found: Carriers = {}
    for kind, some in by_kind.items():
        # An event that has not ended lasts until the last rollout.
        spans = np.minimum(np.array(disjoint(some), dtype=np.float64), held.end_s.max())
        before_s = np.concatenate(([0.0], np.cumsum(spans[:, 1] - spans[:, 0])))
        first, last = np.searchsorted(spans[:, 1], begin_s, "left"), np.searchsorted(spans[:, 0], end_s, "right")
        touched = last > first
        missed_s = np.maximum(0.0, begin_s - spans[np.minimum(first, len(spans) - 1), 0])
        seconds = np.where(touched, before_s[np.maximum(first, last)] - before_s[first] - missed_s, 0.0)
        found[kind, ""] = np.nonzero(touched)[0]
        found[kind, LONG] = np.nonzero(touched & (seconds >= np.median(seconds) + least_s))[0]
    return found


def common_factors(
    cohorts: Cohorts, held_up: Mapping[str, Held], meanwhile: Sequence[Interval]
) -> dict[str, list[tuple[Factor, frozenset[int]]]]:
    """Return the factors of each part with the rollouts that have them, the most convincing first. Compared are the
    rollouts that ended by themselves."""
    rows = cohorts.rows
    numbers = {group: number for number, group in enumerate(dict.fromkeys(row.group for row in rows))}
    groups = np.fromiter((numbers[row.group] for row in rows), dtype=np.int64, count=len(rows))
    tools = [column for part, column in cohorts.column.items() if part.startswith(TOOL)]
    labels = carriers_of(rows, cohorts.seconds[:, tools].sum(axis=1))
    events = {interval.kind for interval in meanwhile}
    found: defaultdict[str, list[_Tested]] = defaultdict(list)
    least: list[float] = []
    for part, held in held_up.items():
        if len(held.places) < LEAST_SUPPORT:
            continue
        population, slow = cohorts.finished, np.zeros(len(rows), dtype=np.bool_)
        slow[held.places] = population[held.places]
        nearest = NEAREST.get(stage_of(part), ())
        every = _Tested(part, (), np.nonzero(population)[0], slow, population, groups, held)
        tested = [*_in_time(every)]
        for names, places in distinct_sets(part, labels | beside(held, meanwhile), population):
            kinds = [kind for kind, _ in names]
            order = sorted(range(len(names)), key=lambda at: (kinds[at] in LAST, _rank(nearest, kinds[at])))
            tested.append(replace(every, names=tuple(names[at] for at in order), places=places))
        # Grows by the windows of labels that stand out.
        for each in tested:
            least.append(each.least_p())
            if (factor := each.factor()) is not None:
                found[part].append(replace(each, whole=factor))
                if factor.begin_s is None and factor.kind not in events and factor.p <= ALONE:
                    tested += each.windows()
    limit = discovery_limit([each.whole.p for some in found.values() for each in some if each.whole], least)
    return {part: list(independent_factors(part, some, limit, events)) for part, some in found.items()}


def _in_time(every: _Tested) -> Iterator[_Tested]:
    """Yield the level or the windows of a part as hypotheses, from one that has all rollouts."""
    level = every.held.level
    if level is None:
        yield from every.windows()
        return
    after = every.places[every.held.begin_s[every.places] >= level.begin_s]
    when = level.begin_s, None
    yield replace(every, names=((AFTER, ""),), places=after, picked=len(every.places), when=when)


def distinct_sets(part: str, carriers: Carriers, population: Flags) -> Iterator[tuple[list[tuple[str, str]], Places]]:
    """Yield the sets of rollouts that factors have, each with the names of all of them: factors that the same rollouts
    have are one hypothesis."""
    found: defaultdict[bytes, list[tuple[str, str]]] = defaultdict(list)
    sets: dict[bytes, Places] = {}
    total = int(population.sum())
    for (kind, value), all_places in carriers.items():
        # These restate the cause.
        if (kind == "tools" and part.startswith(TOOL)) or (kind == "failed_by" and part == EARLIER_ATTEMPTS):
            continue
        places = all_places[population[all_places]]
        if 0 < len(places) < total:
            sets[places.tobytes()] = places
            found[places.tobytes()].append((kind, value))
    for key, names in found.items():
        yield names, sets[key]


@dataclass(frozen=True, slots=True)
class _Tested:
    """A hypothesis: slow rollouts of this part are more frequent among `places`. `groups` numbers the group of each
    rollout, and `whole` is the factor over the whole population, once it is tested. `picked` is the number of
    hypotheses from which this one was picked by its rollouts, and `when` its begin and end."""

    part: str
    names: tuple[tuple[str, str], ...]
    places: Places
    slow: Flags
    population: Flags
    groups: Places
    held: Held
    whole: Factor | None = None
    picked: int = 1
    when: tuple[float | None, float | None] = (None, None)

    def least_p(self) -> float:
        """Return the smallest probability that the test can have, with as many slow rollouts."""
        slow = int(self.slow.sum())
        p = upper_tail(int(self.population.sum()), len(self.places), slow, min(slow, len(self.places)))
        return min(1.0, self.picked * p)

    def windows(self) -> Iterator[_Tested]:
        """Yield the windows in which the slow ones of these rollouts crowd, each as one of all windows among them. The
        windows of a label bear its name."""
        among = np.zeros(len(self.population), dtype=np.bool_)
        among[self.places] = True
        picked = len(self.places) * (len(self.places) + 1) // 2
        for each in windows(self.held.begin_s, self.held.extent_s, self.slow & among, among, self.groups):
            names, when = self.names or ((WINDOW, ""),), (each.begin_s, each.end_s)
            yield replace(self, names=names, places=each.places, picked=picked, when=when)

    def overlapping(self) -> Places:
        """Return the rollouts whose phase overlaps the time of this window or level."""
        begin_s, end_s = self.when
        met = (self.held.end_s >= (begin_s or 0.0)) & (self.held.begin_s <= (math.inf if end_s is None else end_s))
        return np.nonzero(met)[0]

    def stands(self, without: Places) -> bool:
        """Return whether it is likely also among the rollouts that are not in `without`."""
        factor = self.factor(without)
        return factor is not None and factor.p <= ALONE

    def factor(self, without: Places | None = None) -> Factor | None:
        """Test it among the rollouts that are not in `without`; None if too few slow rollouts have it, or not often
        enough."""
        population = self.population.copy()
        population[[] if without is None else without] = False
        places, slow = self.places[population[self.places]], self.slow & population
        support, all_slow, total = int(slow[places].sum()), int(slow.sum()), int(population.sum())
        others, slow_others = total - len(places), all_slow - support
        if support < LEAST_SUPPORT or support * others < LEAST_RATIO * slow_others * len(places):
            return None
        if len(np.unique(self.groups[places[slow[places]]])) < LEAST_GROUPS:
            return None
        texts = dict.fromkeys(kind if value in ("", LONG) else f"{kind} {value}" for kind, value in self.names)
        kind, value = self.names[0]
        return Factor(
            kind=kind,
            value="" if value == LONG else value,
            support=support,
            slow=all_slow,
            lift=(support / all_slow) / (len(places) / total),
            p=min(1.0, self.picked * upper_tail(total, len(places), all_slow, support)),
            same=tuple(texts)[1:],
            begin_s=self.when[0],
            end_s=self.when[1],
        )


def discovery_limit(probabilities: Iterable[float], least: Sequence[float]) -> float:
    """Return the largest probability that Benjamini and Yekutieli accept among these; -1 if there is none. `least` are
    the smallest probabilities that each of all tests can have: tests that cannot succeed are not counted (Tarone, A
    modified Bonferroni method for discrete data, 1990; Gilbert, 2005, for false discovery rates)."""
    ordered = sorted(least)
    tests = next(
        (count for count in range(1, len(least)) if bisect_right(ordered, FALSE_DISCOVERIES / count) <= count),
        max(1, len(least)),
    )
    limit = FALSE_DISCOVERIES / sum(1 / number for number in range(1, tests + 1)) / tests
    accepted = [p for number, p in enumerate(sorted(probabilities), start=1) if p <= limit * number]
    return max(accepted, default=-1.0)


def independent_factors(
    part: str, found: Sequence[_Tested], limit: float, events: Collection[str]
) -> Iterator[tuple[Factor, frozenset[int]]]:
    """Yield the factors of a part, the most convincing first, each if it still stands among the rollouts that no
    factor before it has."""
    stage = stage_of(part)
    nearest, direct = NEAREST.get(stage, ()), DIRECT.get(stage, ())

    def group(factor: Factor) -> tuple[bool, bool]:
        return factor.kind not in direct, factor.kind in LAST

    left = [(each.whole, each) for each in found if each.whole is not None and each.whole.p <= limit]
    moments = [(each.whole.p, each) for each in found if each.whole is not None and each.when[0] is not None]
    if moments:
        moment = min(moments, key=itemgetter(0))[1].overlapping()
        left = [pair for pair in left if pair[0].kind not in events or pair[0].kind in direct or pair[1].stands(moment)]
    left.sort(key=lambda pair: (group(pair[0]), pair[0].p))
    explained = np.zeros(0, dtype=np.int64)
    while left:
        first = left[0][0]
        near = [pair for pair in left if group(pair[0]) == group(first) and pair[0].p <= NEAR * first.p]
        best = min(near, key=lambda pair: (_rank(nearest, pair[0].kind), pair[0].p))
        if best[0].kind == WINDOW:
            # An event that occurred again and again says more than one of its occurrences.
            recurring = (pair for pair in left if pair[0].kind in events and _covers(pair[1], best[1]))
            best = next(recurring, best)
        left = [pair for pair in left if pair is not best]
        factor, each = best
        again = each.factor(explained)
        if again is not None and again.p <= limit:
            yield factor, frozenset(each.places.tolist())
            explained = np.union1d(explained, each.places)


def _covers(event: _Tested, window: _Tested) -> bool:
    """Return whether most slow rollouts of a window met an event."""
    slow = window.places[window.slow[window.places]]
    return bool(np.isin(slow, event.places).mean() >= COVERED)


def _rank(nearest: Sequence[str], kind: str) -> int:
    return nearest.index(kind) if kind in nearest else len(nearest)


def upper_tail(total: int, marked: int, drawn: int, hits: int) -> float:
    """Return P(X >= hits) for `drawn` of `total` without replacement, `marked` of which count."""
    logs = _log_factorials(total)

    def log_choose(n: int, k: Places) -> Floats:
        chosen: Floats = logs[n] - logs[k] - logs[n - k]
        return chosen

    counts = np.arange(max(hits, drawn - (total - marked)), min(marked, drawn) + 1)
    terms = log_choose(marked, counts) + log_choose(total - marked, drawn - counts)
    return min(1.0, float(np.exp(terms - log_choose(total, np.array(drawn))).sum()))


@lru_cache(maxsize=8)
def _log_factorials(largest: int) -> Floats:
    """Return log(n!) for n from 0 to `largest`."""
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, largest + 1)))))


def disjoint(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return disjoint spans in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
