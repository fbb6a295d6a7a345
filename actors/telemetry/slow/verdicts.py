"""The verdict on each slow rollout, and the causes of a run by cost (docs/slow.md has the formulas).

Invariants:
- A plain function of rows, steps and events: no clock, no files.
- "No common factor" is a valid answer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np

from headrace.actors.telemetry.slow.advice import OVERLOADED, advise
from headrace.actors.telemetry.slow.cohort import ENOUGH, Cohorts
from headrace.actors.telemetry.slow.factors import Factor, common_factors
from headrace.actors.telemetry.slow.findings import (
    RATIO,
    Floats,
    Found,
    Phases,
    against_cohort,
    factor_of,
    held_up_by_part,
    slow_by_factor,
    slow_by_level,
    slow_tasks,
)
from headrace.actors.telemetry.slow.rows import RUNNING, RolloutTime, RunTimes, StepTime
from headrace.buffer.trajectories.breakdown import is_of_agent


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
class BesideCohort:
    """The parts of a rollout beside its cohort: `parts_s` and `excess_s` by part, and medians and 90th percentiles of
    n other members in the order of `names`. A long run has thousands of verdicts of which few are looked at."""

    names: Sequence[str]
    parts_s: Mapping[str, float]
    excess_s: Mapping[str, float]
    p50_s: Sequence[float]
    p90_s: Sequence[float]
    n: int

    def parts(self) -> Iterator[PartVerdict]:
        """Yield the parts in which the rollout, or a tenth of its cohort, spent any time."""
        for part, p50_s, p90_s in zip(self.names, self.p50_s, self.p90_s, strict=True):
            seconds = self.parts_s.get(part, 0.0)
            if seconds or p90_s:
                excess_s = self.excess_s.get(part, 0.0)
                yield PartVerdict(part=part, seconds=seconds, p50_s=p50_s, p90_s=p90_s, n=self.n, excess_s=excess_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Verdict on one slow rollout. `causes` are the parts with the most excess: one, or two if no part has half of it.
    `against` says what it is slow against: `cohort`; `tasks` if its whole task is slow; `level` if a part rose for
    good, of which its cohort has the new level; or `factor` if it is not above the p95 of its cohort, since a common
    factor slows so many of it."""

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
    waits_s: Mapping[str, float]
    beside: BesideCohort

    @property
    def part(self) -> str:
        return self.causes[0]

    @property
    def parts(self) -> tuple[PartVerdict, ...]:
        return tuple(self.beside.parts())

    def to_json(self) -> dict[str, Any]:
        document = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "beside"}
        parts = [asdict(part) for part in self.parts]
        return document | {"factor": self.factor and asdict(self.factor), "parts": parts}


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
            same = f"; the same rollouts have {', '.join(self.factor.same)}" if self.factor.same else ""
            of_slow = f"{self.factor.support} of {self.factor.slow}"
            evidence = f" (lift {self.factor.lift:.1f}, {of_slow}, p {self.factor.p:.1g}{same})"
        return (
            f"{self.part}, {factor}{evidence}: {self.rollouts} rollouts, {self.excess_s:.1f} s more than typical, "
            f"steps delayed by {self.cost_s:.1f} s; {self.advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """A stretch of the run in Unix time, and how many slow rollouts fall into it."""

    rollouts: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowReport:
    """Verdicts of a run, the costliest first. `few` counts rollouts whose cohort had to borrow from the recipe;
    `outside_agent` is the share of all excess in parts before and after the agent. `crowd` is the stretch of the run,
    as long as a usual rollout, in which most of the slow rollouts had their slow part."""

    rollouts: int
    few: int
    verdicts: tuple[Verdict, ...]
    causes: tuple[RunCause, ...]
    missing: tuple[str, ...]
    outside_agent: float | None
    crowd: Crowd | None = None

    def to_json(self, verdicts: Sequence[Verdict]) -> dict[str, Any]:
        """Return the report with these verdicts of it: all those of a long run take seconds to convert."""
        shown = {"verdicts": [verdict.to_json() for verdict in verdicts], "slow": len(self.verdicts)}
        return asdict(replace(self, verdicts=())) | shown


def explain(times: RunTimes, *, of_recipe: bool = False, first_part_only: bool = False) -> SlowReport:
    """Explain the slow rollouts of a run. `of_recipe` compares every rollout with all others instead of its cohort, and
    `first_part_only` names the longest part instead of that with the most excess; both are ablations."""
    cohorts = Cohorts(times.rows, of_recipe=of_recipe)
    medians, highs, counts = cohorts.limits()
    slow = np.nonzero((cohorts.totals > highs) & (cohorts.totals > RATIO * medians))[0]
    phases = Phases.find(cohorts)
    found = slow_by_level(cohorts, phases, medians)
    found |= against_cohort(cohorts, phases, medians, slow, "cohort") | slow_tasks(cohorts)
    held_up = held_up_by_part(cohorts, phases, medians, found)
    factors = common_factors(cohorts, held_up, times.meanwhile)
    found |= slow_by_factor(cohorts, phases, medians, held_up, factors, found)
    places = np.array(sorted(found), dtype=np.int64)
    typical, finished = cohorts.part_quantiles(places, (0.5, 0.9))
    costs = step_costs(times.rows, times.steps, {place: each.total_excess_s for place, each in found.items()})
    verdicts = []
    for place, quantiles, n in zip(places.tolist(), typical.tolist(), finished.tolist(), strict=True):
        item, row = found[place], times.rows[place]
        parts = (max(row.parts_s, key=row.parts_s.__getitem__),) if first_part_only else item.causes
        factor = factor_of(parts[0], place, factors)
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
                excess_s=item.total_excess_s,
                causes=parts,
                factor=factor,
                cost_s=costs.get(place, 0.0),
                advice=advise(parts[0], None if factor is None else factor.kind, overloaded=is_overloaded(row)),
                waits_s=row.waits_s,
                beside=BesideCohort(
                    names=cohorts.parts,
                    parts_s=row.parts_s,
                    excess_s=item.excess_s,
                    p50_s=quantiles[0],
                    p90_s=quantiles[1],
                    n=n,
                ),
            )
        )
    verdicts.sort(key=lambda verdict: (-verdict.cost_s, -verdict.excess_s, verdict.rollout_id))
    return SlowReport(
        rollouts=len(times.rows),
        few=int((counts < ENOUGH).sum()),
        verdicts=tuple(verdicts),
        causes=rank(verdicts),
        missing=(*times.missing, *clock_lines(times.rows)),
        outside_agent=outside_agent_share(found),
        crowd=crowd_of(cohorts, phases, found, medians),
    )


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
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for place in members:
            groups[rows[place].group].append(place)
        ready_s = {group: max(rows[place].ready_at_s or 0.0 for place in some) for group, some in groups.items()}
        for place in members:
            row = rows[place]
            if place not in excess_s or row.ended_at_s is None:
                continue
            own = (rows[other].ended_at_s or 0.0 for other in groups[row.group] if other != place)
            others = (at_s for group, at_s in ready_s.items() if group != row.group)
            there_s = max(chain(own, others), default=row.issued_at_s)
            # After a restart the batch may be leased long after it was full; that is no fault of the rollout.
            delay_s = min(row.ended_at_s, step.leased_at_s) - max(there_s, step.free_at_s)
            costs[place] = min(max(0.0, delay_s), excess_s[place])
    return costs


def rank(verdicts: Sequence[Verdict]) -> tuple[RunCause, ...]:
    """Return the causes of a run, those with a factor first, which can be mended; of each kind the costliest first: by
    seconds of delayed steps, then by excess."""
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
            advice=Counter(one.advice for one in some).most_common(1)[0][0],
        )
        for (part, _), some in groups.items()
    ]
    return tuple(sorted(causes, key=lambda cause: (cause.factor is None, -cause.cost_s, -cause.excess_s, cause.part)))


def is_overloaded(row: RolloutTime) -> bool:
    """Return whether a rollout's host had more work than CPUs, as far as its load says."""
    load = row.labels.get("load")
    return isinstance(load, int | float) and load >= OVERLOADED


def crowd_of(cohorts: Cohorts, phases: Phases, found: Mapping[int, Found], medians: Floats) -> Crowd | None:
    """Return where most slow rollouts had the middle of their slow part; None if nothing was slow."""
    known = medians[np.isfinite(medians)]
    if not found or not len(known):
        return None
    extents = {part: phases.extent(cohorts, [part]) for part in {each.causes[0] for each in found.values()}}
    middle_s = {part: (begin_s + end_s) / 2 for part, (begin_s, end_s) in extents.items()}
    at_s = np.sort([middle_s[each.causes[0]][place] for place, each in found.items()])
    length_s = float(np.median(known))
    counts = np.searchsorted(at_s, at_s + length_s, "right") - np.arange(len(at_s))
    first = int(np.argmax(counts))
    return Crowd(rollouts=int(counts[first]), begin_s=float(at_s[first]), end_s=float(at_s[first + counts[first] - 1]))


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


def outside_agent_share(found: Mapping[int, Found]) -> float | None:
    """Return the share of the excess in parts before and after the agent; None if nothing was slow."""
    total_s = sum(each.total_excess_s for each in found.values())
    agent_s = sum(
        seconds
        for each in found.values()
        for part, seconds in each.excess_s.items()
        if is_of_agent(part) or part in ("agent", RUNNING)
    )
    return None if total_s <= 0 else 1 - agent_s / total_s
