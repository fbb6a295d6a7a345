"""The verdict on each slow rollout, and the causes of a run by cost (docs/slow.md has the formulas).

Invariants:
- A plain function of rows, steps and events: no clock, no files.
- A rollout is slow against its cohort, or, where a whole task is slow in one part, against the other tasks.
- Excess is the seconds that the cohort's median would save; it is never negative.
- "No common factor" is a valid answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from headrace.actors.slowness.advice import advise
from headrace.actors.slowness.cohort import Cohorts
from headrace.actors.slowness.factors import Factor, common_factors
from headrace.actors.slowness.rows import RUNNING, RolloutTime, in_order
from headrace.buffer.breakdown import is_of_agent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from headrace.actors.slowness.reading import RunTimes, StepTime

RATIO: Final = 1.5
"""A slow rollout takes longer than this many times the median of its cohort."""
OUTLYING: Final = 6.0
"""A task is slow in a part if its median exceeds that of all tasks by this many robust standard deviations (1.4826
times the median absolute deviation of the tasks' medians) ..."""
LEAST_SHARE: Final = 0.5
"""... and by this share of a typical rollout's total."""
LEAST_TASKS: Final = 4
LEAST_MEMBERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PartVerdict:
    """Seconds of one part beside what is typical of it."""

    part: str
    seconds: float
    p50_s: float
    p90_s: float
    n: int
    excess_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on one slow rollout. `causes` are the parts with the most excess: one, or two if no part has half of it.
    `against` says what it is slow against: `cohort`, or `tasks` if its whole task is slow."""

    rollout_id: str
    attempt: int
    task: str
    step: int
    trained_step: int | None
    running: bool
    against: str
    total_s: float
    p50_s: float
    p95_s: float
    n: int
    excess_s: float
    causes: tuple[str, ...]
    factor: Factor | None
    cost_s: float
    advice: str
    parts: tuple[PartVerdict, ...]
    waits_s: Mapping[str, float]

    @property
    def part(self) -> str:
        return self.causes[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCause:
    """A cause of slowness over the whole run: a part and a factor, with the rollouts that they held up."""

    part: str
    factor: Factor | None
    rollouts: int
    excess_s: float
    cost_s: float
    advice: str

    def line(self) -> str:
        factor = "no common factor" if self.factor is None else self.factor.text()
        evidence = ""
        if self.factor is not None:
            evidence = (
                f" (lift {self.factor.lift:.1f}, {self.factor.support} of {self.factor.slow}, p {self.factor.p:.1g})"
            )
        return (
            f"{self.part}, {factor}{evidence}: {self.rollouts} rollouts, {self.excess_s:.1f} s more than typical, "
            f"steps delayed by {self.cost_s:.1f} s; {self.advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowReport:
    """Verdicts of a run, the costliest first. `few` counts rollouts whose cohort had to borrow from the recipe;
    `outside_agent` is the share of all excess in parts before and after the agent."""

    rollouts: int
    few: int
    verdicts: tuple[Verdict, ...]
    causes: tuple[RunCause, ...]
    missing: tuple[str, ...]
    outside_agent: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"slow": len(self.verdicts)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A slow rollout before its factor is known; `medians` has the typical seconds of each part."""

    place: int
    against: str
    medians: Mapping[str, float]
    excess_s: Mapping[str, float]


def explain(times: RunTimes, *, of_recipe: bool = False, first_part_only: bool = False) -> SlowReport:
    """Explain the slow rollouts of a run. `of_recipe` compares every rollout with all others instead of its cohort, and
    `first_part_only` names the longest part instead of that with the most excess; both are ablations."""
    cohorts = Cohorts(times.rows, of_recipe=of_recipe)
    medians, highs, counts = cohorts.limits()
    found = slow_tasks(cohorts)
    slow = np.nonzero((cohorts.totals > highs) & (cohorts.totals > RATIO * medians))[0]
    for place in map(int, slow):
        if place not in found:
            typical = {part: each.p50_s for part, each in cohorts.typical_parts(place).items()}
            found[place] = _of(times.rows[place], place, "cohort", typical, float(medians[place]))
    causes = {place: causes_of(item, times.rows[place], longest=first_part_only) for place, item in found.items()}
    factors = common_factors(times.rows, held_up_by_part(cohorts, medians, causes), times.meanwhile)
    costs = step_costs(times.rows, times.steps, {place: sum(each.excess_s.values()) for place, each in found.items()})
    verdicts = []
    for place, item in found.items():
        row, parts = times.rows[place], causes[place]
        factor = next((factor for factor, places in factors.get(parts[0], ()) if place in places), None)
        verdicts.append(
            Verdict(
                rollout_id=row.rollout_id,
                attempt=row.attempt,
                task=row.task,
                step=row.step,
                trained_step=row.trained_step,
                running=row.ended_at_s is None,
                against=item.against,
                total_s=row.total_s,
                p50_s=float(medians[place]),
                p95_s=float(highs[place]),
                n=int(counts[place]),
                excess_s=sum(item.excess_s.values()),
                causes=parts,
                factor=factor,
                cost_s=costs.get(place, 0.0),
                advice=advise(parts[0], None if factor is None else factor.kind),
                parts=_part_verdicts(cohorts, place, item),
                waits_s=row.waits_s,
            )
        )
    verdicts.sort(key=lambda verdict: (-verdict.cost_s, -verdict.excess_s, verdict.rollout_id))
    return SlowReport(
        rollouts=len(times.rows),
        few=int((counts < LEAST_MEMBERS * 2).sum()),
        verdicts=tuple(verdicts),
        causes=rank(verdicts),
        missing=(*times.missing, *clock_lines(times.rows)),
        outside_agent=outside_agent_share(found),
    )


def held_up_by_part(
    cohorts: Cohorts, medians: NDArray[np.float64], causes: Mapping[int, tuple[str, ...]]
) -> dict[str, set[int]]:
    """Return, for each part that held up a slow rollout, all rollouts that it held up: also those above 1.5 times the
    median of their cohort only. A factor of a whole task slows more of its rollouts than lie above its p95."""
    held_up: defaultdict[str, set[int]] = defaultdict(set)
    for place, parts in causes.items():
        held_up[parts[0]].add(place)
    for place in map(int, np.nonzero((cohorts.totals > RATIO * medians) & cohorts.finished)[0]):
        if place not in causes:
            row = cohorts.rows[place]
            typical = {part: each.p50_s for part, each in cohorts.typical_parts(place).items()}
            part = causes_of(_of(row, place, "cohort", typical, 0.0), row, longest=False)[0]
            if part in held_up:
                held_up[part].add(place)
    return dict(held_up)


def step_costs(
    rows: Sequence[RolloutTime], steps: Sequence[StepTime], excess_s: Mapping[int, float]
) -> dict[int, float]:
    """Return the seconds by which each slow rollout (by place) delayed the step that trained it: from when the learner
    was free and all other members were there, to the rollout's end, at most its excess. A member is there when its
    group was sealed; members of the rollout's own group would have been sealed without it, and count from their end.
    The batch would have been full without it only if it is the last one."""
    place_of = {row.rollout_id: place for place, row in enumerate(rows)}
    costs = {}
    for step in steps:
        members = [place_of[rollout] for rollout in step.rollouts if rollout in place_of]
        for place in members:
            row = rows[place]
            if place not in excess_s or row.ended_at_s is None:
                continue
            others = [rows[other] for other in members if other != place]
            there_s = max(
                ((one.ended_at_s if one.group == row.group else one.ready_at_s) or 0.0 for one in others),
                default=row.issued_at_s,
            )
            # After a restart the batch may be leased long after it was full; that is no fault of the rollout.
            delay_s = min(row.ended_at_s, step.leased_at_s) - max(there_s, step.free_at_s)
            costs[place] = min(max(0.0, delay_s), excess_s[place])
    return costs


def rank(verdicts: Sequence[Verdict]) -> tuple[RunCause, ...]:
    """Return the causes of a run, the costliest first: by seconds of delayed steps, then by excess."""
    groups: defaultdict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for verdict in verdicts:
        groups[verdict.part, "" if verdict.factor is None else verdict.factor.text()].append(verdict)
    causes = [
        RunCause(
            part=part,
            factor=some[0].factor,
            rollouts=len(some),
            excess_s=sum(one.excess_s for one in some),
            cost_s=sum(one.cost_s for one in some),
            advice=some[0].advice,
        )
        for (part, _), some in groups.items()
    ]
    return tuple(sorted(causes, key=lambda cause: (-cause.cost_s, -cause.excess_s, cause.part)))


def clock_lines(rows: Sequence[RolloutTime]) -> list[str]:
    """Return a line if workers measured more time than passed on the ledger's clock."""
    worst = max(rows, key=lambda row: row.clock_s, default=None)
    if worst is None or not worst.clock_s:
        return []
    count = sum(1 for row in rows if row.clock_s)
    where = worst.labels.get("node") or worst.labels.get("host") or "its worker"
    line = (
        f"clocks disagree: for {count} rollouts the workers measured more time than passed on the ledger's clock, by "
        f"up to {worst.clock_s:.3g} s ({worst.rollout_id} on {where}); their parts count, and no time is negative"
    )
    return [line]


def slow_tasks(cohorts: Cohorts) -> dict[int, _Found]:
    """Return the rollouts of tasks that are slow as a whole, in one part, beside the other tasks. Their own cohorts
    would hide it."""
    tasks = {key: places for key, places in cohorts.by_task().items() if len(places) >= LEAST_MEMBERS}
    by_recipe: defaultdict[tuple[str, str], list[tuple[str, str, str]]] = defaultdict(list)
    for key in tasks:
        by_recipe[key[:2]].append(key)
    found: dict[int, _Found] = {}
    for keys in by_recipe.values():
        if len(keys) < LEAST_TASKS:
            continue
        medians = np.stack([cohorts.part_medians(tasks[key]) for key in keys])
        middle = np.median(medians, axis=0)
        spread = 1.4826 * np.median(np.abs(medians - middle), axis=0)
        least_s = LEAST_SHARE * float(np.median(medians.sum(axis=1)))
        above = medians - middle
        outlying = (above > OUTLYING * spread) & (above > least_s)
        typical = dict(zip(cohorts.parts, middle.tolist(), strict=True))
        total_s = float(np.median(medians.sum(axis=1)))
        for number in np.nonzero(outlying.any(axis=1))[0]:
            part = cohorts.parts[int(np.argmax(np.where(outlying[number], above[number], -np.inf)))]
            for place in map(int, tasks[keys[number]]):
                row = cohorts.rows[place]
                if row.parts_s.get(part, 0.0) - typical[part] > least_s:
                    found[place] = _of(row, place, "tasks", typical, total_s)
    return found


def _of(row: RolloutTime, place: int, against: str, typical: Mapping[str, float], total_s: float) -> _Found:
    # A running attempt has no parts yet; it is compared as a whole.
    medians = {**typical, RUNNING: total_s if row.ended_at_s is None else 0.0}
    excess = {part: max(0.0, seconds - medians.get(part, 0.0)) for part, seconds in row.parts_s.items()}
    return _Found(place=place, against=against, medians=medians, excess_s=excess)


def causes_of(found: _Found, row: RolloutTime, *, longest: bool) -> tuple[str, ...]:
    """Return the part with the most excess, or two if it has less than half of all excess."""
    if longest:
        return (max(row.parts_s, key=lambda part: row.parts_s[part]),)
    by_excess = sorted(found.excess_s, key=lambda part: (-found.excess_s[part], in_order(part)))
    enough = 2 * found.excess_s[by_excess[0]] >= sum(found.excess_s.values())
    return tuple(by_excess[: 1 if enough else 2])


def _part_verdicts(cohorts: Cohorts, place: int, found: _Found) -> tuple[PartVerdict, ...]:
    row, typical = cohorts.rows[place], cohorts.typical_parts(place)
    return tuple(
        PartVerdict(
            part=part,
            seconds=row.parts_s.get(part, 0.0),
            p50_s=each.p50_s,
            p90_s=each.p90_s,
            n=each.n,
            excess_s=found.excess_s.get(part, 0.0),
        )
        for part, each in typical.items()
        if row.parts_s.get(part) or each.p90_s
    )


def outside_agent_share(found: Mapping[int, _Found]) -> float | None:
    """Return the share of the excess in parts before and after the agent; None if nothing was slow."""
    total_s = sum(sum(each.excess_s.values()) for each in found.values())
    agent_s = sum(
        seconds
        for each in found.values()
        for part, seconds in each.excess_s.items()
        if is_of_agent(part) or part in ("agent", RUNNING)
    )
    return None if total_s <= 0 else 1 - agent_s / total_s
