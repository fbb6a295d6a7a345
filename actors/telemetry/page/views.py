"""What each view of the page shows, from what was read.

Invariants:
- Plain functions of readings: no clock, no files.
- Every list is bounded, and says how many of its entries are not shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from headrace.actors.record.files.utilisation import mean_in_flight, mean_loads
from headrace.actors.telemetry.page.drawing import Box, histogram, stacked
from headrace.actors.telemetry.page.metrics_tail import Record, Records
from headrace.actors.telemetry.page.slow_verdicts import Explained
from headrace.actors.telemetry.slow.verdicts import Verdict

ROWS: Final = 100
"""Rows of a table on one page of it."""
RECENT_STATIONS: Final = 30
"""Records of the stations over which their load is averaged: about five minutes."""
POINTS: Final = 1_500
"""Points of a series; of more, evenly chosen ones are sent."""
_OF_A_PUSH: Final = ("updated", "quarantined")
TRAINING: Final = ("step_s", "idle_s", "push_s")


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a list: entries `first` to `last` (from 1) of `total`; `page` from 1 of `pages`."""

    rows: Sequence[Any]
    first: int
    last: int
    total: int
    page: int
    pages: int


def cut(rows: Sequence[Any], page: int, size: int = ROWS) -> Cut:
    """Return one page of a list; a page beyond the last is the last."""
    pages = max(1, -(-len(rows) // size))
    page = min(max(1, page), pages)
    some = rows[(page - 1) * size : page * size]
    first = (page - 1) * size
    return Cut(some, first + 1 if some else 0, first + len(some), len(rows), page, pages)


def number(record: Record | None, key: str) -> float | None:
    """Return a finite number of a record; None if it has none, since files may be damaged."""
    value = None if record is None else record.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) < float("inf") else None


def overview(records: Records, found: Explained | None) -> dict[str, Any]:
    """Return the figures, the load of the stations, staleness, and the costliest causes of slowness."""
    steps, evaluations = records.of("step"), records.of("evaluation")
    last = records.last("step")
    recent = [record for record in records.of("stations")[-RECENT_STATIONS:] if is_whole(record)]
    trained: Counter[int] = Counter()
    for step in steps:
        for staleness, count in counts_of(step.get("staleness")):
            trained[staleness] += count
    total = trained.total()
    known_idle = [(number(step, "idle_s"), number(step, "step_s"), number(step, "push_s")) for step in steps]
    idle_s = sum(idle or 0.0 for idle, _, _ in known_idle)
    learner_s = sum(sum(each or 0.0 for each in parts) for parts in known_idle)
    stalls = records.of("stall")
    return {
        "last": last,
        "reward": number(last, "reward"),
        "rewards": [value for step in steps if (value := number(step, "reward")) is not None],
        "base": next((record for record in evaluations if record.get("tag") == "base"), None),
        "newest": evaluations[-1] if evaluations else None,
        "evaluations": evaluations[-8:][::-1],
        "staleness": histogram(trained),
        "mean_staleness": sum(value * count for value, count in trained.items()) / total if total else None,
        "trained": total,
        "idle_share": idle_s / learner_s if learner_s > 0 else None,
        "loads": [(load, load_boxes(load.utilisation)) for load in mean_loads(recent)],
        "in_flight": mean_in_flight(recent) if recent else None,
        "held_up_by": recent[-1].get("held_up_by") if recent else None,
        "causes": [] if found is None else found.report.causes[:5],
        "stall": stalls[-1] if stalls else None,
        "alarm": records.last("mismatch_alarm"),
        "collapsed": lines if isinstance(lines := (last or {}).get("collapsed"), list) else [],
    }


def is_whole(record: Record) -> bool:
    """Return True for a record of the stations that has what their load is computed from."""
    stations = record.get("stations")
    return (
        number(record, "seconds") is not None
        and isinstance(stations, dict)
        and all(
            isinstance(load, dict) and {"in_use", "capacity", "mean_s"} <= load.keys() for load in stations.values()
        )
    )


def counts_of(value: object) -> list[tuple[int, int]]:
    """Return the pairs of a table of counts in a record, without those that are none."""
    if not isinstance(value, dict):
        return []
    return [(int(key), count) for key, count in value.items() if str(key).isdigit() and isinstance(count, int)]


def load_boxes(utilisation: float | None) -> list[Box]:
    """Return the bar of a station's load; empty without a capacity."""
    if utilisation is None:
        return []
    return stacked([("full" if utilisation >= 0.9 else "used", min(1.0, utilisation))], 1.0)


def chosen(verdicts: Sequence[Verdict], *, step: int | None, part: str) -> list[Verdict]:
    """Return the verdicts on rollouts issued at a step, and held up by a part."""
    return [
        verdict
        for verdict in verdicts
        if (step is None or verdict.step == step) and (not part or part in verdict.causes)
    ]


def verdict_rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Return verdicts with what is typical, and a bar of the time up to that and beyond. Where a whole task is slow,
    the other tasks are what is typical, not its own cohort."""
    longest_s = max((verdict.total_s for verdict in verdicts), default=0.0)
    rows = []
    for verdict in verdicts:
        of_cohort = verdict.against == "cohort"
        typical_s = verdict.p50_s if of_cohort else max(0.0, verdict.total_s - verdict.excess_s)
        usual_s = min(verdict.total_s, typical_s)
        boxes = stacked([("usual", usual_s), ("excess", verdict.total_s - usual_s)], longest_s)
        rows.append({"verdict": verdict, "typical_s": typical_s, "of_cohort": of_cohort, "boxes": boxes})
    return rows


def step_rows(records: Records) -> list[dict[str, Any]]:
    """Return the steps, newest first, each with a bar of the learner's time."""
    rows: list[dict[str, Any]] = []
    for record in reversed(records.of("step")):
        parts = [(key.removesuffix("_s"), number(record, key) or 0.0) for key in TRAINING]
        rows.append({"record": record, "parts": dict(parts), "total_s": sum(value for _, value in parts)})
    longest = max((row["total_s"] for row in rows[:ROWS]), default=0.0)
    for row in rows:
        row["boxes"] = stacked(
            [(key, row["parts"][key]) for key in ("idle", "push", "step")], max(longest, row["total_s"])
        )
    return rows


def push_rows(records: Records) -> list[dict[str, Any]]:
    """Return the pushes, newest first, each with a bar of its time."""
    rows: list[dict[str, Any]] = []
    for record in reversed(records.of("push")):
        seconds = record.get("seconds")
        phases = seconds if isinstance(seconds, dict) else {}
        known = [(phase, float(value)) for phase, value in phases.items() if isinstance(value, int | float)]
        largest = sorted(known, key=lambda each: -each[1])[:3]
        total = number(record, "total_s") or 0.0
        engines = {key: len(found) if isinstance(found := record.get(key), list) else 0 for key in _OF_A_PUSH}
        rows.append({"record": record, "total_s": total, "phases": largest, **engines})
    longest = max((row["total_s"] for row in rows), default=0.0)
    for row in rows:
        row["boxes"] = stacked([("used", row["total_s"])], longest)
    return rows


def thinned(records: Sequence[Record]) -> Sequence[Record]:
    stride = -(-len(records) // POINTS)
    return records if stride <= 1 else [*records[::stride], records[-1]]


def by_step(records: Records, kind: str) -> dict[int, Record]:
    """Return the records of a kind by step, in order. After a return to a checkpoint, the newer one counts."""
    known = {int(step): record for record in records.of(kind) if (step := number(record, "step")) is not None}
    return {int(record["step"]): record for record in thinned([known[step] for step in sorted(known)])}


def reward_series(records: Records) -> dict[str, Any]:
    """Return mean reward by step, and success on held-out tasks at the steps of the evaluations."""
    steps, held_out = by_step(records, "step"), by_step(records, "evaluation")
    xs = sorted({*steps, *held_out})
    rewards = [number(steps.get(x), "reward") for x in xs]
    success = [number(held_out.get(x), "success") for x in xs]
    series = [{"label": "reward", "y": rewards}, {"label": "held-out success", "y": success, "points": True}]
    return {"x": xs, "x_label": "step", "time": False, "series": series}


def learner_series(records: Records) -> dict[str, Any]:
    """Return where the learner's time goes, by step, in seconds."""
    steps = by_step(records, "step")
    labels = {"step_s": "training", "idle_s": "waiting for a batch", "push_s": "waiting for a push"}
    series = [{"label": name, "y": [number(step, key) for step in steps.values()]} for key, name in labels.items()]
    return {"x": list(steps), "x_label": "step", "time": False, "unit": "s", "series": series}


def staleness_series(records: Records) -> dict[str, Any]:
    """Return the mean and the largest staleness by step, in optimizer steps."""
    steps = by_step(records, "step")
    mean: list[float | None] = []
    largest: list[int | None] = []
    for step in steps.values():
        counts = [(staleness, count) for staleness, count in counts_of(step.get("staleness")) if count > 0]
        total = sum(count for _, count in counts)
        mean.append(sum(staleness * count for staleness, count in counts) / total if total else None)
        largest.append(max((staleness for staleness, _ in counts), default=None))
    series = [{"label": "mean", "y": mean}, {"label": "largest", "y": largest}]
    return {"x": list(steps), "x_label": "step", "time": False, "series": series}


def load_series(records: Records) -> dict[str, Any]:
    """Return rollouts in flight and in each station, over time."""
    loads = [record for record in thinned(records.of("stations")) if is_whole(record)]
    names = list(dict.fromkeys(name for record in loads for name in record["stations"]))[:8]
    series = [{"label": "in flight", "y": [number(record, "in_flight") for record in loads]}]
    series += [
        {"label": name, "y": [number(record["stations"].get(name), "in_use") for record in loads]} for name in names
    ]
    return {"x": [record["time_s"] for record in loads], "x_label": "UTC", "time": True, "series": series}


SERIES: Final[dict[str, Callable[[Records], dict[str, Any]]]] = {
    "reward": reward_series,
    "learner": learner_series,
    "staleness": staleness_series,
    "load": load_series,
}
