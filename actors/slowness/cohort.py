"""Typical durations: the cohort of each rollout, and quantiles of it.

The cohort of a rollout has the same task, purpose and agent, and versions at most `NEAR_STEPS` steps away. Its recipe
has the same purpose and agent, and versions as near. With n other members in the cohort, n < `ENOUGH`, a quantile is
(n / ENOUGH) times that of the cohort plus the rest times that of the recipe; with more members it is the cohort's own.

Invariants:
- A rollout is not a member of its own cohort: what is typical does not depend on it.
- Rollouts that have not ended by themselves are censored (Kaplan-Meier), so stragglers that still run are not ignored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.actors.slowness.rows import in_order
from headrace.actors.slowness.survival import SurvivalCurve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from headrace.actors.slowness.rows import RolloutTime

    Floats = NDArray[np.float64]
    Places = NDArray[np.int64]

NEAR_STEPS: Final = 10
ENOUGH: Final = 8


@dataclass(frozen=True, slots=True)
class Typical:
    """Median and 90th percentile in seconds, and the number of other rollouts in the cohort itself."""

    p50_s: float
    p90_s: float
    n: int


class Cohorts:
    """Cohorts of all rows of a run. `of_recipe` compares every rollout with its recipe only (an ablation)."""

    def __init__(self, rows: Sequence[RolloutTime], *, of_recipe: bool = False) -> None:
        self.rows = rows
        self.parts = sorted({part for row in rows for part in row.parts_s}, key=in_order)
        column = {part: place for place, part in enumerate(self.parts)}
        self.seconds = np.zeros((len(rows), len(self.parts)))
        for place, row in enumerate(rows):
            for part, seconds in row.parts_s.items():
                self.seconds[place, column[part]] = seconds
        self.totals: Floats = np.array([row.total_s for row in rows], dtype=np.float64)
        self.finished = np.array([row.finished for row in rows], dtype=np.bool_)
        self._steps = np.array([row.step for row in rows], dtype=np.int64)
        self._tasks = _sorted_by_step([(row.purpose, row.agent, row.task) for row in rows], self._steps)
        self._recipes = _sorted_by_step([(row.purpose, row.agent) for row in rows], self._steps)
        self._of_recipe = of_recipe

    def members(self, place: int) -> Places:
        """Return the places of the other rollouts of the cohort."""
        return _near(self._tasks, self._key(place), self._steps[place], place)

    def recipe(self, place: int) -> Places:
        """Return the places of the other rollouts of the recipe; of all versions if the near ones are few."""
        near = _near(self._recipes, self._key(place)[:2], self._steps[place], place)
        if len(near) >= ENOUGH:
            return near
        everywhere = self._recipes[self._key(place)[:2]][1]
        others: Places = everywhere[everywhere != place]
        return others

    def limits(self) -> tuple[Floats, Floats, Places]:
        """Return the median and the 95th percentile of each rollout's cohort, and its number of other members."""
        medians, highs = np.full(len(self.rows), np.inf), np.full(len(self.rows), np.inf)
        counts = np.zeros(len(self.rows), dtype=np.int64)
        recipes: dict[tuple[str, str, int], Floats] = {}
        for key, (steps, places) in self._tasks.items():
            for step in np.unique(steps):
                first, last = np.searchsorted(steps, (step - NEAR_STEPS, step + NEAR_STEPS + 1))
                here = places[slice(*np.searchsorted(steps, (step, step + 1)))]
                near = places[first:last]
                own = self._without_each(near, here)
                n = len(near) - 1
                if self._of_recipe or n < ENOUGH:
                    if (key[0], key[1], int(step)) not in recipes:
                        others = self.recipe(int(here[0]))
                        recipes[(key[0], key[1], int(step))] = self._quantiles(others, (0.5, 0.95))
                    weight = 0.0 if self._of_recipe else max(0, n) / ENOUGH
                    own = _blend(own, recipes[(key[0], key[1], int(step))], weight)
                medians[here], highs[here], counts[here] = own[:, 0], own[:, 1], max(0, n)
        return medians, highs, counts

    def typical(self, place: int, values: Floats | None = None) -> Typical:
        """Return what is typical of the total for a rollout's cohort, or of these values (one for each row)."""
        of = self.totals if values is None else values
        members = self.members(place)
        weight = 0.0 if self._of_recipe else min(1.0, len(members) / ENOUGH)
        p50_s, p90_s = self._quantiles(members, (0.5, 0.9), of)
        if weight < 1:
            p50_s, p90_s = _blend(np.array([p50_s, p90_s]), self._quantiles(self.recipe(place), (0.5, 0.9), of), weight)
        return Typical(float(p50_s), float(p90_s), len(members))

    def typical_parts(self, place: int) -> dict[str, Typical]:
        """Return what is typical of each part, over the finished rollouts of the cohort: those that still run have
        no parts yet."""
        members, others = self.members(place), self.recipe(place)
        members, others = members[self.finished[members]], others[self.finished[others]]
        weight = 0.0 if self._of_recipe else min(1.0, len(members) / ENOUGH)
        own, recipe = (
            np.quantile(self.seconds[some], (0.5, 0.9), axis=0) if len(some) else np.zeros((2, len(self.parts)))
            for some in (members, others)
        )
        p50_s, p90_s = weight * own + (1 - weight) * recipe
        return {
            part: Typical(float(p50_s[column]), float(p90_s[column]), len(members))
            for column, part in enumerate(self.parts)
        }

    def part_medians(self, places: Places) -> Floats:
        """Return the median of each part over the finished ones of these rollouts."""
        done = places[self.finished[places]]
        return np.median(self.seconds[done], axis=0) if len(done) else np.zeros(len(self.parts))

    def by_task(self) -> dict[tuple[str, str, str], Places]:
        """Return the places of the rollouts of each purpose, agent and task, over all versions."""
        return {(key[0], key[1], key[2]): places for key, (_, places) in self._tasks.items()}

    def _key(self, place: int) -> tuple[str, str, str]:
        row = self.rows[place]
        return (row.purpose, row.agent, row.task)

    def _without_each(self, near: Places, here: Places) -> Floats:
        """Return median and 95th percentile of `near` without each of `here`, of shape (here, 2)."""
        if self.finished[near].all() and len(near) > 1:
            ordered = near[np.argsort(self.totals[near], kind="stable")]
            position = {int(place): rank for rank, place in enumerate(ordered)}
            ranks = np.array([position[int(place)] for place in here])
            values = self.totals[ordered]
            return np.stack([_quantile_without(values, ranks, share) for share in (0.5, 0.95)], axis=1)
        return np.array([self._quantiles(near[near != place], (0.5, 0.95)) for place in here])

    def _quantiles(self, places: Places, ranks: Sequence[float], of: Floats | None = None) -> Floats:
        """Return quantiles; infinite where too few have ended."""
        values, finished = (self.totals if of is None else of)[places], self.finished[places]
        if not finished.any():
            return np.full(len(ranks), np.inf)
        if finished.all():
            return np.quantile(values, ranks)
        curve = SurvivalCurve.estimate(values.tolist(), finished.tolist())
        return np.array([curve.quantile_s(rank) for rank in ranks])


def _quantile_without(ordered: Floats, ranks: Places, share: float) -> Floats:
    """Return a quantile (linear interpolation) of an ordered sample without the element at each rank."""
    at = (len(ordered) - 2) * share
    low, high = math.floor(at), math.ceil(at)
    below, above = ordered[low + (low >= ranks)], ordered[high + (high >= ranks)]
    result: Floats = below + (above - below) * (at - low)
    return result


def _blend(own: Floats, recipe: Floats, weight: float) -> Floats:
    """Return the weighted mean of two sets of quantiles, where either may be unknown (infinite)."""
    known = np.where(np.isfinite(own), own, recipe)
    others = np.where(np.isfinite(recipe), recipe, known)
    # A quantile may be infinite, and 0 times infinity is no number.
    if weight in (0, 1):
        return known if weight else others
    return weight * known + (1 - weight) * others


def _sorted_by_step(keys: Sequence[tuple[str, ...]], steps: Places) -> dict[tuple[str, ...], tuple[Places, Places]]:
    """Return the steps and places of the rows with each key, in the order of steps."""
    places: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    ordered = {}
    for key, found in places.items():
        array = np.array(found, dtype=np.int64)
        array = array[np.argsort(steps[array], kind="stable")]
        ordered[key] = (steps[array], array)
    return ordered


def _near(ordered: dict[tuple[str, ...], tuple[Places, Places]], key: tuple[str, ...], step: int, place: int) -> Places:
    steps, places = ordered[key]
    first, last = np.searchsorted(steps, (step - NEAR_STEPS, step + NEAR_STEPS + 1))
    near = places[first:last]
    others: Places = near[near != place]
    return others
