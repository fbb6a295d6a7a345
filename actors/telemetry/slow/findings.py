"""Which rollouts were slow, by how much in each part, and which others the same parts held up.

Invariants:
- A rollout is slow against its cohort; where a whole task is slow in one part, against the other tasks; where a part
  rose for good, against what it took before; and where a common factor slows so much of a cohort that its p95 is that
  of slow ones, because of the factor.
- Excess is the seconds that the median would save; it is never negative.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from headrace.actors.telemetry.slow.cohort import Cohorts
from headrace.actors.telemetry.slow.factors import LEAST_SUPPORT, Factor, Held
from headrace.actors.telemetry.slow.moments import OUTLYING, Level, level
from headrace.actors.telemetry.slow.rows import (
    DISPATCH,
    EARLIER_ATTEMPTS,
    RUNNING,
    STALENESS_WAIT,
    UNATTRIBUTED,
    is_of_evaluation,
)
from headrace.actors.telemetry.slow.samples import robust_deviation
from headrace.buffer.trajectories.breakdown import BEFORE_AGENT, GATE, TOOL, is_of_agent

Floats = NDArray[np.float64]
Places = NDArray[np.int64]
Factors = Mapping[str, Sequence[tuple[Factor, frozenset[int]]]]

RATIO: Final = 1.5
"""A slow rollout takes longer than this many times the median of its cohort."""
HELD_UP: Final = 0.5
"""A part held a rollout up if it took this share of a typical rollout longer than its own median."""
LEAST_SHARE: Final = 0.5
"""A task is slow in a part, or as a whole, if its median exceeds that of all tasks by `OUTLYING` robust standard
deviations of the tasks' medians, and by this share of a typical rollout's total."""
SHARED: Final = 8
"""An image is compared with the others if at least one of so many tasks has it."""
LEAST_TASKS: Final = 4
LEAST_MEMBERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A slow rollout before its factor is known; `against` is `cohort`, `tasks`, `level` or `factor`, `excess_s` are
    the seconds of its parts above what is typical of them, where they are any, and `causes` is the part with the most
    excess, or two if it has less than half of all."""

    against: str
    excess_s: Mapping[str, float]
    causes: tuple[str, ...]

    @property
    def total_excess_s(self) -> float:
        return sum(self.excess_s.values())


@dataclass(frozen=True, slots=True)
class Phases:
    """Begin and end of the phase of each part in each rollout, in Unix time, each of shape (rows,), and the levels of
    parts that rose for good."""

    of: Mapping[str, tuple[Floats, Floats]]
    levels: Mapping[str, Level]

    @classmethod
    def find(cls, cohorts: Cohorts) -> Phases:
        """Find the phases and levels of all parts."""
        phases = phases_of(cohorts, cohorts.parts)
        done = np.nonzero(cohorts.finished)[0]
        levels = {}
        # A gate is open until the first push, and that is no rise.
        for part in (part for part in cohorts.parts if part != GATE):
            seconds = cohorts.seconds[done, cohorts.column[part]]
            if (found := level(phases[part][0][done], seconds, cohorts.totals[done])) is not None:
                levels[part] = found
        return cls(phases, levels)

    def extent(self, cohorts: Cohorts, parts: Sequence[str]) -> tuple[Floats, Floats]:
        """Return begin and end of parts of one phase together in each rollout; those of the phase where they are not
        known."""
        columns, (begin_s, end_s) = [cohorts.column[part] for part in parts], self.of[parts[0]]
        first_s, last_s = (extents[:, columns] for extents in cohorts.extents)
        known = np.isfinite(first_s).any(axis=1)
        return np.where(known, first_s.min(axis=1), begin_s), np.where(known, last_s.max(axis=1), end_s)

    def typical(self, cohorts: Cohorts, places: Places) -> Floats:
        """Return the median seconds of each part in the cohorts of these rollouts, of shape (places, parts); of a part
        that rose for good, at most those before."""
        typical = cohorts.part_quantiles(places, (0.5,))[0][:, 0]
        for part, rise in self.levels.items():
            column, after = cohorts.column[part], self.of[part][0][places] >= rise.begin_s
            typical[after, column] = np.minimum(typical[after, column], rise.before_s)
        return typical


def against_cohort(cohorts: Cohorts, phases: Phases, medians: Floats, places: Places, against: str) -> dict[int, Found]:
    """Return these rollouts with their excess over the medians of their cohorts."""
    return _found(cohorts, places, against, phases.typical(cohorts, places), medians[places])


def slow_by_level(cohorts: Cohorts, phases: Phases, medians: Floats) -> dict[int, Found]:
    """Return the rollouts that a part which rose for good made slow against the time before. Their cohorts, which have
    the new level, would hide it."""
    found: dict[int, Found] = {}
    for part, rise in phases.levels.items():
        above_s = cohorts.seconds[:, cohorts.column[part]] - rise.before_s
        after = cohorts.finished & (phases.of[part][0] >= rise.begin_s)
        places = np.nonzero(after & (cohorts.totals > RATIO * (cohorts.totals - above_s)))[0]
        found |= against_cohort(cohorts, phases, medians, places, "level")
    return found


def slow_tasks(cohorts: Cohorts) -> dict[int, Found]:
    """Return the rollouts of tasks that are slow as a whole beside the other tasks: in one part or, where several take
    a little longer, in all parts together. Their own cohorts would hide it."""
    tasks = {key: places for key, places in cohorts.by_task.items() if len(places) >= LEAST_MEMBERS}
    by_recipe: defaultdict[tuple[str, str], list[tuple[str, str, str]]] = defaultdict(list)
    for key in tasks:
        by_recipe[key[:2]].append(key)
    found: dict[int, Found] = {}
    for keys in by_recipe.values():
        if len(keys) < LEAST_TASKS:
            continue
        of_parts = np.stack([cohorts.part_medians(tasks[key]) for key in keys])
        medians = np.column_stack((of_parts, of_parts.sum(axis=1)))
        for numbers, others, columns in compared_tasks(cohorts, [tasks[key] for key in keys]):
            middle = np.median(medians[others], axis=0)
            spread = robust_deviation(medians[others] - middle)
            total_s = float(middle[-1])
            least_s = LEAST_SHARE * total_s
            above = medians - middle
            outlying = columns & (above > OUTLYING * spread) & (above > least_s)
            for number in numbers[outlying[numbers].any(axis=1)]:
                members, in_parts = tasks[keys[number]], np.nonzero(outlying[number, :-1])[0]
                if len(in_parts):
                    part = in_parts[np.argmax(above[number, in_parts])]
                    over_s = cohorts.seconds[members, part] - middle[part]
                else:
                    over_s = cohorts.totals[members] - total_s
                slow = members[over_s > least_s]
                typical = np.broadcast_to(middle[:-1], (len(slow), len(middle) - 1))
                found |= _found(cohorts, slow, "tasks", typical, np.full(len(slow), total_s))
    return found


def compared_tasks(cohorts: Cohorts, tasks: Sequence[Places]) -> Iterator[tuple[Places, Places, NDArray[np.bool_]]]:
    """Yield numbers of tasks, of those that they are compared with, and in which parts, or (last) as a whole: with all;
    and in what an image may slow, which would be typical of itself if half of the tasks have it, with tasks of the same
    family that have another one, if these are enough. An image that few tasks have changes nothing that is typical."""
    every = np.arange(len(tasks))
    of_image = [part in BEFORE_AGENT or is_of_evaluation(part) for part in cohorts.parts]
    yield every, every, np.ones(len(of_image) + 1, dtype=np.bool_)
    families: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, places in enumerate(tasks):
        labels = cohorts.rows[places[0]].labels
        families[str(labels.get("family", ""))][str(labels.get("image", ""))].append(number)
    for images in families.values():
        of_family = np.sort(np.concatenate(list(images.values())))
        for with_image in images.values():
            if SHARED * len(with_image) >= len(of_family) >= len(with_image) + LEAST_TASKS - 1:
                others = np.setdiff1d(of_family, with_image, assume_unique=True)
                yield np.array(with_image), others, np.array([*of_image, False])


def held_up_by_part(cohorts: Cohorts, phases: Phases, medians: Floats, found: Mapping[int, Found]) -> dict[str, Held]:
    """Return the rollouts that each part held up: the slow ones of which it is the cause, and those in which it took
    longer than its median by `HELD_UP` of a typical rollout, since a factor slows more rollouts than lie above the p95.
    Several tools are also counted together, as `TOOL`, since what slows a sandbox slows them all."""
    tools = [part for part in cohorts.parts if part.startswith(TOOL)]
    groups = {part: [part] for part in cohorts.parts if part != RUNNING}
    if len(tools) > 1:
        groups[TOOL] = tools
    columns = {name: [cohorts.column[part] for part in parts] for name, parts in groups.items()}
    spent_s = {name: cohorts.seconds[:, some].sum(axis=1) for name, some in columns.items()}
    least_s = HELD_UP * medians
    longer = np.zeros(len(cohorts.rows), dtype=np.bool_)
    for seconds in spent_s.values():
        longer |= seconds > least_s
    candidates = np.nonzero(cohorts.finished & longer)[0]
    typical, held_up = phases.typical(cohorts, candidates), {}
    caused: defaultdict[str, list[int]] = defaultdict(list)
    for place, each in found.items():
        caused[each.causes[0]].append(place)
    for name, parts in groups.items():
        above_s = spent_s[name][candidates] - typical[:, columns[name]].sum(axis=1)
        held = above_s > least_s[candidates]
        excess_s = dict(zip(candidates[held].tolist(), above_s[held].tolist(), strict=True))
        for part in parts:
            for place in caused[part]:
                excess_s.setdefault(place, found[place].excess_s.get(part, 0.0))
        if len(excess_s) >= LEAST_SUPPORT:
            begin_s, end_s = phases.of[parts[0]]
            held_up[name] = Held(
                places=np.array(list(excess_s), dtype=np.int64),
                excess_s=np.array(list(excess_s.values())),
                spent_s=spent_s[name],
                begin_s=begin_s,
                end_s=end_s,
                extent_s=phases.extent(cohorts, parts),
                level=phases.levels.get(name),
            )
    return held_up


def phases_of(cohorts: Cohorts, parts: Iterable[str]) -> dict[str, tuple[Floats, Floats]]:
    """Return begin and end of the phase of each part in each rollout, in Unix time, each of shape (rows,): before the
    agent, while it worked, or in the evaluation.

    The phase and not the part: where an event made the part longer, or there only, its own position would depend on
    what it is compared with (of 20 runs slowed by an evaluation 16 were explained with it, 19 with the phase)."""
    rows, (begins_s, ends_s) = cohorts.rows, cohorts.extents
    first_s, issued_s = np.array([(row.issued_at_s, row.last_issued_at_s) for row in rows]).reshape(-1, 2).T
    whole = issued_s, first_s + cohorts.totals

    def phase(belongs: Callable[[str], bool]) -> tuple[Floats, Floats]:
        columns = [column for part, column in cohorts.column.items() if belongs(part)]
        begin_s, end_s = (
            begins_s[:, columns].min(axis=1, initial=np.inf),
            ends_s[:, columns].max(axis=1, initial=-np.inf),
        )
        known = np.isfinite(begin_s)
        return np.where(known, begin_s, whole[0]), np.where(known, end_s, whole[1])

    # An order competes for a place from its issue on.
    before = issued_s, phase(BEFORE_AGENT.__contains__)[1]
    agent, evaluation = phase(is_of_agent), phase(is_of_evaluation)
    found = {}
    for part in parts:
        if part in (EARLIER_ATTEMPTS, STALENESS_WAIT):
            found[part] = first_s, issued_s
        elif part in (DISPATCH, UNATTRIBUTED, RUNNING):
            found[part] = whole
        else:
            found[part] = before if part in BEFORE_AGENT else evaluation if is_of_evaluation(part) else agent
    return found


def slow_by_factor(
    cohorts: Cohorts,
    phases: Phases,
    medians: Floats,
    held_up: Mapping[str, Held],
    factors: Factors,
    found: Mapping[int, Found],
) -> dict[int, Found]:
    """Return the rollouts that a part with a common factor held up, that have the factor and are above 1.5 times the
    median of their cohort, but not above its p95: if a factor slows more than 5 % of a cohort, its p95 is that of slow
    ones."""
    carriers = {
        place
        for part, some in factors.items()
        for _, places in some
        for place in places.intersection(held_up[part].places.tolist())
        if cohorts.totals[place] > RATIO * medians[place]
    }
    hidden = np.array(sorted(carriers - found.keys()), dtype=np.int64)
    return {
        place: each
        for place, each in against_cohort(cohorts, phases, medians, hidden, "factor").items()
        if factor_of(each.causes[0], place, factors) is not None
    }


def factor_of(part: str, place: int, factors: Factors) -> Factor | None:
    """Return the most convincing factor of this part that a rollout has: of a tool also one of all tools together."""
    both = (*factors.get(part, ()), *(factors.get(TOOL, ()) if part.startswith(TOOL) else ()))
    return next((factor for factor, places in both if place in places), None)


def _found(cohorts: Cohorts, places: Places, against: str, typical_s: Floats, total_s: Floats) -> dict[int, Found]:
    """Return these rollouts by place; `typical_s` are the seconds that are typical of each part, of shape (places,
    parts), and `total_s` of all parts together."""
    seconds, typical_s = cohorts.seconds[places], typical_s.copy()
    if (column := cohorts.column.get(RUNNING)) is not None:
        # A running attempt has no parts yet; it is compared as a whole.
        typical_s[:, column] = np.where(seconds[:, column] > 0, total_s, 0.0)
    excess_s = np.maximum(0.0, seconds - typical_s)
    # Parts are in the order of a rollout, so of equal ones the first counts.
    most = np.argsort(np.where(seconds > 0, -excess_s, np.inf), axis=1, kind="stable")[:, :2].tolist()
    found = {}
    for place, own_s, order in zip(places.tolist(), excess_s.tolist(), most, strict=True):
        enough = 2 * own_s[order[0]] >= sum(own_s)
        causes = tuple(cohorts.parts[column] for column in (order[:1] if enough else order))
        above_s = {part: seconds for part, seconds in zip(cohorts.parts, own_s, strict=True) if seconds}
        found[place] = Found(against=against, excess_s=above_s, causes=causes)
    return found
