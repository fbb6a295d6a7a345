"""Typical durations: the cohort of each rollout, and quantiles of it.

The cohort of a rollout has the same task, purpose and agent, and versions at most `NEAR_STEPS` steps away. Its recipe
has the same purpose and agent, and versions of the same block of `NEAR_STEPS` steps and of those beside it; all
versions if these are few. With n other members in the cohort, n < `ENOUGH`, a quantile is (n / ENOUGH) times that of
the cohort plus the rest times that of the recipe; with more members it is the cohort's own.

Invariants:
- A rollout is not a member of its own cohort: what is typical does not depend on it.
- Rollouts that have not ended by themselves are censored (Kaplan-Meier), so stragglers that still run are not ignored.
- Rollouts of one cohort and step are compared at once, since a long run has tens of thousands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.actors.telemetry.slow.rows import RolloutTime, in_order
from headrace.actors.telemetry.slow.samples import columns_without, durations_without, quantiles_of

Floats = NDArray[np.float64]
Places = NDArray[np.int64]

Key = TypeVar("Key")

NEAR_STEPS: Final = 10
ENOUGH: Final = 8


@dataclass(frozen=True, slots=True)
class Typical:
    """Median and 90th percentile in seconds, and the number of other rollouts in the cohort itself."""

    p50_s: float
    p90_s: float
    n: int


@dataclass(frozen=True, slots=True)
class _Group:
    """The rollouts of one cohort and step, `near[begin:end]`, among those of near steps; and the key of their
    recipe."""

    near: Places
    begin: int
    end: int
    recipe: tuple[str, str, int]

    @property
    def here(self) -> Places:
        return self.near[self.begin : self.end]


class Cohorts:
    """Cohorts of all rows of a run. `of_recipe` compares every rollout with its recipe only (an ablation)."""

    def __init__(self, rows: Sequence[RolloutTime], *, of_recipe: bool = False) -> None:
        self.rows = rows
        self.parts = sorted(set(chain.from_iterable(row.parts_s for row in rows)), key=in_order)
        self.column = {part: place for place, part in enumerate(self.parts)}
        self.totals: Floats = np.array([row.total_s for row in rows], dtype=np.float64)
        self.finished = np.array([row.finished for row in rows], dtype=np.bool_)
        self._steps = np.array([row.step for row in rows], dtype=np.int64)
        self._of_recipe = of_recipe
        self._recipes: dict[tuple[str, str, int], Places] = {}
        self._borrowed: dict[tuple[tuple[str, str, int], tuple[float, ...]], Floats] = {}

    @cached_property
    def seconds(self) -> Floats:
        """Seconds of each part, of shape (rows, parts)."""
        values = [row.parts_s.get(part, 0.0) for row in self.rows for part in self.parts]
        return np.array(values, dtype=np.float64).reshape(len(self.rows), len(self.parts))

    @cached_property
    def extents(self) -> tuple[Floats, Floats]:
        """Begin and end of each part in Unix time, both of shape (rows, parts); infinite and minus infinite where a
        part, or its time, is not known."""
        shape = (len(self.rows), len(self.parts))
        begin_s, end_s = np.full(shape, np.inf), np.full(shape, -np.inf)
        counts = [len(row.within_s) for row in self.rows]
        rows = np.repeat(np.arange(len(self.rows)), counts)
        # A part of no time has no column.
        columns = np.array([self.column.get(part, -1) for row in self.rows for part in row.within_s], dtype=np.int64)
        flat = chain.from_iterable(chain.from_iterable(row.within_s.values() for row in self.rows))
        within_s = np.fromiter(flat, dtype=np.float64, count=2 * len(rows)).reshape(-1, 2)
        began_s = np.array([np.nan if row.began_at_s is None else row.began_at_s for row in self.rows])
        known = (columns >= 0) & np.isfinite(began_s[rows])
        at = rows[known], columns[known]
        begin_s[at], end_s[at] = (within_s[known] + began_s[at[0]][:, None]).T
        return begin_s, end_s

    def limits(self) -> tuple[Floats, Floats, Places]:
        """Return the median and the 95th percentile of each rollout's cohort, infinite where too few have ended, and
        its number of other members."""
        ranks = (0.5, 0.95)
        quantiles, counts = np.full((len(self.rows), 2), np.inf), np.zeros(len(self.rows), dtype=np.int64)
        shapes: defaultdict[tuple[int, int], list[_Group]] = defaultdict(list)
        for group in self._groups:
            shapes[len(group.near), len(group.here)].append(group)
        borrowed: dict[tuple[str, str, int], Floats] = {}
        for (members, _), some in shapes.items():
            near, here = np.stack([group.near for group in some]), np.stack([group.here for group in some])
            at = np.array([group.begin for group in some])[:, None] + np.arange(here.shape[1])
            weight = 0.0 if self._of_recipe else min(1.0, (members - 1) / ENOUGH)
            own = durations_without(self.totals[near], self.finished[near], at, ranks)
            if weight < 1:
                for group in some:
                    if group.recipe not in borrowed:
                        others = self._recipe(group.recipe)
                        borrowed[group.recipe] = quantiles_of(self.totals[others], self.finished[others], ranks)
                own = _blend(own, np.stack([borrowed[group.recipe] for group in some])[:, None], weight)
            quantiles[here], counts[here] = own, members - 1
        return quantiles[:, 0], quantiles[:, 1], counts

    def part_quantiles(self, places: Places, ranks: Sequence[float]) -> tuple[Floats, Places]:
        """Return quantiles of each part over the finished rollouts of the cohorts, of shape (places, ranks, parts), and
        the numbers of other members. Rollouts that still run have no parts yet."""
        size = (len(places), len(ranks), len(self.parts))
        result, counts = np.zeros(size), np.zeros(len(places), dtype=np.int64)
        order = np.argsort(self._group_of[places], kind="stable")
        numbers, begins = np.unique(self._group_of[places[order]], return_index=True)
        shapes: defaultdict[tuple[int, int], list[tuple[Places, Places, _Group]]] = defaultdict(list)
        for number, at in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True) if len(places) else ():
            group = self._groups[number]
            members = group.near[self.finished[group.near]]
            shapes[len(members), len(at)].append((members, at, group))
        for (count, _), some in shapes.items():
            members, at = np.stack([each[0] for each in some]), np.stack([each[1] for each in some])
            here = places[at]
            own = columns_without(self.seconds[members], self.seconds[here], self.finished[here], ranks)
            counts[at] = n = count - self.finished[here]
            weight = np.zeros(n.shape) if self._of_recipe else np.minimum(1.0, n / ENOUGH)
            if (weight < 1).any():
                borrowed = np.stack([self._part_quantiles_of_recipe(group.recipe, tuple(ranks)) for *_, group in some])
                shares = weight[:, :, None, None]
                own = shares * own + (1 - shares) * borrowed[:, None]
            result[at] = own
        return result, counts

    def _part_quantiles_of_recipe(self, key: tuple[str, str, int], ranks: tuple[float, ...]) -> Floats:
        """Return quantiles of each part over the finished rollouts of a recipe, of shape (ranks, parts)."""
        if (key, ranks) not in self._borrowed:
            others = self._recipe(key)
            others = others[self.finished[others]]
            none = np.zeros((len(ranks), len(self.parts)))
            self._borrowed[key, ranks] = np.quantile(self.seconds[others], ranks, axis=0) if len(others) else none
        return self._borrowed[key, ranks]

    def typical_parts(self, place: int) -> dict[str, Typical]:
        """Return what is typical of each part for a rollout's cohort."""
        quantiles, counts = self.part_quantiles(np.array([place]), (0.5, 0.9))
        p50_s, p90_s = quantiles[0].tolist()
        return {part: Typical(p50_s[at], p90_s[at], int(counts[0])) for at, part in enumerate(self.parts)}

    def part_medians(self, places: Places) -> Floats:
        """Return the median of each part over the finished ones of these rollouts."""
        done = places[self.finished[places]]
        return np.median(self.seconds[done], axis=0) if len(done) else np.zeros(len(self.parts))

    @cached_property
    def by_task(self) -> Mapping[tuple[str, str, str], Places]:
        """Places of the rollouts of each purpose, agent and task, over all versions, in the order of steps."""
        return _by_key([(row.purpose, row.agent, row.task) for row in self.rows], self._steps)

    @cached_property
    def _by_recipe(self) -> Mapping[tuple[str, str], Places]:
        return _by_key([(row.purpose, row.agent) for row in self.rows], self._steps)

    @cached_property
    def _groups(self) -> list[_Group]:
        return list(self._each_group())

    @cached_property
    def _group_of(self) -> Places:
        """The number of each rollout's group."""
        numbers = np.zeros(len(self.rows), dtype=np.int64)
        for number, group in enumerate(self._groups):
            numbers[group.here] = number
        return numbers

    def _each_group(self) -> Iterator[_Group]:
        for key, places in self.by_task.items():
            steps = self._steps[places]
            distinct, begins = np.unique(steps, return_index=True)
            ends = [*begins[1:].tolist(), len(places)]
            firsts = np.searchsorted(steps, distinct - NEAR_STEPS, "left").tolist()
            lasts = np.searchsorted(steps, distinct + NEAR_STEPS, "right").tolist()
            for step, begin, end, first, last in zip(
                distinct.tolist(), begins.tolist(), ends, firsts, lasts, strict=True
            ):
                recipe = (key[0], key[1], step // NEAR_STEPS)
                yield _Group(places[first:last], begin - first, end - first, recipe)

    def _recipe(self, key: tuple[str, str, int]) -> Places:
        """Return the rollouts of a recipe near a block of steps; of all versions if there are few."""
        if key not in self._recipes:
            places = self._by_recipe[key[:2]]
            steps, block = self._steps[places], key[2]
            first, last = np.searchsorted(steps, ((block - 1) * NEAR_STEPS, (block + 2) * NEAR_STEPS))
            self._recipes[key] = places[first:last] if last - first > ENOUGH else places
        return self._recipes[key]


def _blend(own: Floats, recipe: Floats, weight: float) -> Floats:
    """Return the weighted mean of two sets of quantiles, where either may be unknown (infinite)."""
    known = np.where(np.isfinite(own), own, recipe)
    others = np.where(np.isfinite(recipe), recipe, known)
    # A quantile may be infinite, and 0 times infinity is no number.
    if weight in (0, 1):
        return known if weight else others
    return weight * known + (1 - weight) * others


def _by_key(keys: Sequence[Key], steps: Places) -> dict[Key, Places]:
    """Return the places of the rows with each key, in the order of steps."""
    found: defaultdict[Key, list[int]] = defaultdict(list)
    for place in np.argsort(steps, kind="stable").tolist():
        found[keys[place]].append(place)
    return {key: np.array(places, dtype=np.int64) for key, places in found.items()}
