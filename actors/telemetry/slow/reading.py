"""Reads the rows and what the run did meanwhile from a run directory.

Invariants:
- Only the columns that verdicts need are read, from the ledger and its archive; trajectories and spans are not.
- Nothing is changed.
- Without metrics the verdicts rest on the ledger alone, and `missing` says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Final, NamedTuple

import orjson

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.telemetry.slow.meanwhile import EVALUATION, add_metrics, intervals_of_ledger
from headrace.actors.telemetry.slow.rows import (
    BUFFER_WAIT,
    DISPATCH,
    EARLIER_ATTEMPTS,
    RUNNING,
    SEAL_WAIT,
    STALENESS_WAIT,
    TOLERANCE_S,
    UNATTRIBUTED,
    RolloutTime,
    RunTimes,
    StepTime,
)
from headrace.buffer.audit.evidence import begin_with_archive, reading
from headrace.buffer.audit.joined_rows import Attempt, JoinedRows
from headrace.buffer.trajectories.breakdown import Label
from headrace.buffer.trajectories.types import Cause, Purpose

ENDED: Final = frozenset({Cause.SOLVED, Cause.FAILED, Cause.BUDGET, Cause.INVALID, Cause.EVALUATOR})
"""Causes of attempts that ended by themselves."""


def read_times(run_dir: Path) -> RunTimes:
    """Read a run. Raises LedgerRefused when there is no ledger that this version of headrace can read."""
    directory = RunDirectory.at(run_dir)
    with reading(directory.path) as (database, archive):
        attached, damage = begin_with_archive(database, archive)
        rows = JoinedRows(database, attached=attached)
        steps = committed_steps(rows)
        groups = {
            group_id: (task_id, ended_at_s)
            for group_id, task_id, ended_at_s in rows.select("groups", ("group_id", "task_id", "ended_at_s"))
        }
        members = list(rows.select("rollouts", ("rollout_id", "group_id", "attempt", "state")))
        attempts: defaultdict[str, list[Attempt]] = defaultdict(list)
        for each in rows.attempts(Purpose.TRAIN):
            attempts[each.rollout_id].append(each)
        intervals = list(intervals_of_ledger(rows, steps))
    trained = {rollout: step for step in steps for rollout in step.rollouts}
    signs = (max(each.issued_at_s or 0.0, each.ended_at_s or 0.0) for tries in attempts.values() for each in tries)
    now_s = max(max(signs, default=0.0), max((step.committed_at_s for step in steps), default=0.0))
    found = []
    for rollout_id, group_id, _, state in members:
        if tries := attempts.get(rollout_id):
            # A compound query has no order.
            tries.sort(key=attrgetter("attempt"))
            task, sealed_at_s = groups[group_id]
            found.append(_row(tries, str(task), group_id, sealed_at_s, trained.get(rollout_id), now_s, state))
    missing = list(damage)
    add_metrics(directory.metrics, intervals, missing)
    return RunTimes(rows=tuple(found), steps=tuple(steps), meanwhile=tuple(intervals), missing=tuple(missing))


def read_evaluation_times(run_dir: Path) -> RunTimes:
    """Read the rollouts of a run's held-out evaluations, whose cohorts are of evaluations only. One without a breakdown
    is left out, and counted in `missing`. Raises LedgerRefused when there is no ledger that this version can read."""
    directory = RunDirectory.at(run_dir)
    tries: defaultdict[str, list[Attempt]] = defaultdict(list)
    with reading(directory.path) as (database, archive):
        attached, damage = begin_with_archive(database, archive)
        rows = JoinedRows(database, attached=attached)
        for each in rows.attempts(Purpose.EVALUATION):
            spent_s = sum(measured_times(each.breakdown).parts_s.values()) if each.breakdown else 0.0
            tries[each.rollout_id].append(each._replace(issued_at_s=(each.ended_at_s or 0.0) - spent_s))
        told = rows.select("evaluations", ("rollout_id", "task_id", "tag"))
        tasks = {rollout_id: (task, tag) for rollout_id, task, tag in told}
        intervals = list(intervals_of_ledger(rows, committed_steps(rows)))
    missing = list(damage)
    add_metrics(directory.metrics, intervals, missing)
    measured = {
        key: sorted(some, key=attrgetter("attempt"))
        for key, some in tries.items()
        if all(each.breakdown for each in some)
    }
    if left_out := len(tries) - len(measured):
        missing.append(f"{left_out} rollouts of evaluations have no breakdown")
    found = [_row(some, *tasks[key], None, None, 0.0, "", purpose=EVALUATION) for key, some in measured.items()]
    # Each of these rollouts ran during one, so that explains nothing.
    others = tuple(interval for interval in intervals if interval.kind != EVALUATION)
    return RunTimes(rows=tuple(found), meanwhile=others, missing=tuple(missing))


def times_with(rollout_id: str, run_dir: Path) -> RunTimes:
    """Return the times of all rollouts like this one: those of training, or of evaluations, whose ids have a `/`."""
    return read_evaluation_times(run_dir) if "/" in rollout_id else read_times(run_dir)


def _row(
    tries: Sequence[Attempt],
    task: str,
    group: str,
    sealed_at_s: float | None,
    trained: StepTime | None,
    now_s: float,
    state: str,
    *,
    purpose: str = "train",
) -> RolloutTime:
    """Return the row of a rollout from its attempts in order."""
    last = tries[-1]
    first_s, issued_s, ended_s = tries[0].issued_at_s or 0.0, last.issued_at_s or 0.0, last.ended_at_s
    # A reissue that waits for a slot, or the ledger's clock stepped back.
    end_s = max(issued_s, now_s if ended_s is None else ended_s)
    spent_s = end_s - issued_s
    measured = None if last.breakdown is None else measured_times(last.breakdown)
    parts, labels, clock_s = _parts(measured, spent_s, ended=ended_s is not None)
    labels |= {"task": task} | ({"tag": group} if purpose == EVALUATION else {})
    if last.host:
        labels["host"] = last.host
    if last.turns:
        labels.setdefault("turns", last.turns)
    if len(tries) > 1:
        labels.update(_failures(tries[:-1]))
        parts = _before(tries, purpose) | parts
    waits = {}
    if ended_s is not None and sealed_at_s is not None:
        waits[SEAL_WAIT] = max(0.0, sealed_at_s - ended_s)
        if trained is not None:
            waits[BUFFER_WAIT] = max(0.0, trained.leased_at_s - max(sealed_at_s, ended_s))
    return RolloutTime(
        rollout_id=last.rollout_id,
        attempt=last.attempt,
        task=task,
        group=group,
        step=int(last.version.rpartition(".")[2]),
        issued_at_s=min(first_s, issued_s),
        last_issued_at_s=issued_s,
        total_s=sum(parts.values()),
        parts_s=parts,
        labels=labels,
        waits_s=waits,
        purpose=purpose,
        agent=str(labels.get("agent", "")),
        ended_at_s=None if ended_s is None else end_s,
        finished=ended_s is not None and last.cause in ENDED,
        ready_at_s=None if ended_s is None else max(end_s, sealed_at_s or 0.0),
        trained_step=None if trained is None else trained.step,
        cause=last.cause or state,
        began_at_s=None if measured is None or ended_s is None else end_s - measured.wall_s,
        within_s={} if measured is None else measured.within_s,
        clock_s=clock_s,
    )


def _failures(tries: Sequence[Attempt]) -> dict[str, tuple[str, ...]]:
    """Return the hosts on which attempts failed, and what they are charged to."""
    failed = sorted({each.host for each in tries if each.cause == Cause.INFRA and each.host})
    charged = sorted({each.charged_to for each in tries if each.charged_to})
    return ({"failed_on": tuple(failed)} if failed else {}) | ({"failed_by": tuple(charged)} if charged else {})


def _before(tries: Sequence[Attempt], purpose: str) -> dict[str, float]:
    """Return the time before the last attempt: the staleness bound ends one of training with a result, or cancels
    it."""
    parts: dict[str, float] = {}
    for each, following in pairwise(tries):
        stale = purpose != EVALUATION and (not each.cause or each.cause == Cause.CANCELLED or each.cause in ENDED)
        part = STALENESS_WAIT if stale else EARLIER_ATTEMPTS
        parts[part] = parts.get(part, 0.0) + max(0.0, (following.issued_at_s or 0.0) - (each.issued_at_s or 0.0))
    return parts


class MeasuredTimes(NamedTuple):
    """Times of a stored breakdown; see `Breakdown`. A long run has tens of thousands."""

    wall_s: float
    parts_s: dict[str, float]
    within_s: dict[str, Sequence[float]]
    labels: dict[str, Label]


def measured_times(breakdown: str) -> MeasuredTimes:
    """Return the times and labels of a stored breakdown."""
    document = orjson.loads(breakdown)
    parts: dict[str, float] = document["parts_s"]
    if min(parts.values(), default=0.0) < 0:
        parts = {part: max(0.0, seconds) for part, seconds in parts.items()}
    return MeasuredTimes(document["wall_s"], parts, document["within_s"], document["labels"])


def _parts(
    measured: MeasuredTimes | None, spent_s: float, *, ended: bool
) -> tuple[dict[str, float], dict[str, Label], float]:
    """Return parts that add up to the time since the issue, labels, and the disagreement of clocks in seconds."""
    parts: dict[str, float] = {}
    labels: dict[str, Label] = {}
    if measured is not None:
        parts, labels = measured.parts_s, measured.labels
        rest = DISPATCH
    else:
        rest = UNATTRIBUTED if ended else RUNNING
    measured_s = sum(parts.values())
    if (left_s := spent_s - measured_s) > 0:
        parts[rest] = parts.get(rest, 0.0) + left_s
    # The worker measures durations on one clock, so they count; the ledger's times come from another.
    return parts, labels, -left_s if ended and left_s < -TOLERANCE_S else 0.0


def committed_steps(rows: JoinedRows) -> list[StepTime]:
    """Return the steps that no resume has undone, in order."""
    batches = {
        batch_id: (members, leased_at_s)
        for batch_id, members, leased_at_s in rows.select("batches", ("batch_id", "members", "leased_at_s"))
    }
    commits = rows.select(
        "commits", ("sequence", "batch_id", "version", "committed_at_s"), where="rolled_back_by IS NULL"
    ).fetchall()
    steps, free_at_s = [], 0.0
    for _, batch_id, version, committed_at_s in sorted(commits):
        if batch_id in batches:
            members, leased_at_s = batches[batch_id]
            steps.append(
                StepTime(
                    step=int(version.rpartition(".")[2]),
                    rollouts=tuple(member[0] for member in orjson.loads(members)),
                    leased_at_s=leased_at_s,
                    committed_at_s=committed_at_s,
                    free_at_s=free_at_s,
                )
            )
        free_at_s = committed_at_s
    return steps
