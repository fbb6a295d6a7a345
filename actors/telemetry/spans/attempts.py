"""The attempts of a run's ledger, each with the trace of its spans and whether it is worth keeping.

Invariant: slow is what `headrace trace slow` calls slow; failed is an attempt that the infrastructure, the evaluator or
the service ended. An answer that does not solve its task is neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.actors.record.files.run_directory import RunDirectory, identity_of
from headrace.actors.telemetry.slow.reading import read_times
from headrace.actors.telemetry.slow.verdicts import explain
from headrace.buffer.audit.evidence import begin_with_archive, reading
from headrace.buffer.audit.joined_rows import JoinedRows
from headrace.buffer.trajectories.types import Cause
from headrace.serve.tracing.tracing import trace_id_text

FAILED: Final = frozenset({Cause.INFRA, Cause.EVALUATOR, Cause.POISON, Cause.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """An attempt that has ended at `ended_at_s` (Unix time of the ledger), about `wall_s` seconds after it began."""

    trace_id: str
    rollout_id: str
    attempt: int
    cause: str
    ended_at_s: float
    wall_s: float

    @property
    def failed(self) -> bool:
        return self.cause in FAILED


def ended_attempts(run_dir: Path, since_s: float = 0.0) -> list[EndedAttempt]:
    """Return the attempts of training and evaluation that ended at `since_s` or later, in the order of their ends.
    Raises LedgerRefused."""
    directory = RunDirectory.at(run_dir)
    run_id = identity_of(directory)
    with reading(directory.path) as (database, archive):
        attached, _ = begin_with_archive(database, archive)
        rows = JoinedRows(database, attached=attached)
        wall = "coalesce(json_extract(breakdown, '$.wall_s'), 0.0)"
        found = []
        for table, time in (("attempts", "ended_at_s"), ("evaluations", "recorded_at_s")):
            columns = ("rollout_id", "attempt", "cause", time, wall)
            found += rows.select(table, columns, where=f"{time} >= ?", values=(since_s,)).fetchall()
    attempts = [
        EndedAttempt(
            trace_id=trace_id_text(run_id, rollout_id, attempt),
            rollout_id=rollout_id,
            attempt=attempt,
            cause=cause or Cause.CANCELLED,
            ended_at_s=ended_at_s,
            wall_s=wall_s,
        )
        for rollout_id, attempt, cause, ended_at_s, wall_s in found
    ]
    return sorted(attempts, key=lambda each: (each.ended_at_s, each.trace_id))


def slow_traces(run_dir: Path) -> frozenset[str]:
    """Return the traces of the attempts that `headrace trace slow` lists. Raises LedgerRefused."""
    run_id = identity_of(RunDirectory.at(run_dir))
    return frozenset(
        trace_id_text(run_id, each.rollout_id, each.attempt) for each in explain(read_times(run_dir)).verdicts
    )


def slow_or_failed(run_dir: Path) -> frozenset[str]:
    """Return the traces of all slow and failed attempts. Raises LedgerRefused."""
    return slow_traces(run_dir) | {each.trace_id for each in ended_attempts(run_dir) if each.failed}
