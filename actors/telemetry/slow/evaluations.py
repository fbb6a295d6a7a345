"""Reads where the time of held-out evaluations went: a row for each of their rollouts.

Invariants:
- Cohorts are those of evaluations only: the same task at other versions, never a training rollout.
- A rollout without a breakdown is left out; `missing` counts them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.telemetry.slow.meanwhile import EVALUATION, add_metrics, intervals_of_ledger
from headrace.actors.telemetry.slow.reading import ENDED, committed_steps, measured_times, read_times
from headrace.actors.telemetry.slow.rows import EARLIER_ATTEMPTS, RolloutTime, RunTimes
from headrace.buffer.audit.evidence import begin_with_archive, reading
from headrace.buffer.audit.joined_rows import JoinedRows

_COLUMNS: Final = (
    "rollout_id",
    "attempt",
    "task_id",
    "tag",
    "version",
    "cause",
    "recorded_at_s",
    "host",
    "breakdown",
)


def read_evaluation_times(run_dir: Path) -> RunTimes:
    """Read the evaluations of a run. Raises LedgerRefused when there is no ledger that this version can read."""
    directory = RunDirectory.at(run_dir)
    tries: defaultdict[str, list[Sequence[Any]]] = defaultdict(list)
    with reading(directory.path) as (database, archive):
        attached, damage = begin_with_archive(database, archive)
        tables = JoinedRows(database, attached=attached)
        for row in tables.select("evaluations", _COLUMNS):
            tries[row[0]].append(row)
        meanwhile = list(intervals_of_ledger(tables, committed_steps(tables)))
    missing = list(damage)
    add_metrics(directory.metrics, meanwhile, missing)
    unmeasured = sum(1 for some in tries.values() if any(row[-1] is None for row in some))
    if unmeasured:
        missing.append(f"{unmeasured} rollouts of evaluations have no breakdown")
    rows = [_row(sorted(some, key=lambda row: row[1])) for some in tries.values() if all(row[-1] for row in some)]
    # Each of these rollouts ran during one, so that explains nothing.
    others = tuple(interval for interval in meanwhile if interval.kind != EVALUATION)
    return RunTimes(rows=tuple(rows), meanwhile=others, missing=tuple(missing))


def times_with(rollout_id: str, run_dir: Path) -> RunTimes:
    """Return the times of all rollouts like this one: those of training, or of evaluations, whose ids have a `/`."""
    return read_evaluation_times(run_dir) if "/" in rollout_id else read_times(run_dir)


def _row(tries: Sequence[Sequence[Any]]) -> RolloutTime:
    """Return the row of an evaluation rollout from its attempts in order."""
    measured = [measured_times(row[-1]) for row in tries]
    starts = [row[6] - sum(each.parts_s.values()) for row, each in zip(tries, measured, strict=True)]
    rollout_id, attempt, task, tag, version, cause, ended_s, host, _ = tries[-1]
    parts, labels = measured[-1].parts_s, measured[-1].labels
    if len(tries) > 1:
        parts = {EARLIER_ATTEMPTS: max(0.0, starts[-1] - starts[0])} | parts
    labels |= {"task": task, "tag": tag, **({"host": host} if host else {})}
    return RolloutTime(
        rollout_id=rollout_id,
        attempt=attempt,
        task=task,
        group=tag,
        step=int(version.rpartition(".")[2]),
        issued_at_s=min(starts),
        last_issued_at_s=starts[-1],
        total_s=sum(parts.values()),
        parts_s=parts,
        labels=labels,
        purpose=EVALUATION,
        agent=str(labels.get("agent", "")),
        ended_at_s=ended_s,
        finished=cause in ENDED,
        ready_at_s=ended_s,
        cause=cause,
        began_at_s=starts[-1],
        within_s=measured[-1].within_s,
    )
