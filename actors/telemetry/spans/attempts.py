"""The attempts of a run's ledger, each with the trace of its spans and whether it is worth keeping.

Invariant: slow is what `headrace trace slow` calls slow; failed is an attempt that the infrastructure, the evaluator or
the service ended. An answer that does not solve its task is neither.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from headrace.actors.record.files.run_directory import RunDirectory, identity_of
from headrace.actors.telemetry.slow.reading import read_times
from headrace.actors.telemetry.slow.verdicts import explain
from headrace.buffer.audit.evidence import rows_of
from headrace.buffer.trajectories.types import Cause
from headrace.serve.tracing.tracing import trace_id_text

FAILED: Final = frozenset({Cause.INFRA, Cause.EVALUATOR, Cause.POISON, Cause.CANCELLED})


def slow_traces(run_dir: Path) -> frozenset[str]:
    """Return the traces of the attempts that `headrace trace slow` lists. Raises LedgerRefused."""
    run_id = identity_of(RunDirectory.at(run_dir))
    return frozenset(
        trace_id_text(run_id, each.rollout_id, each.attempt) for each in explain(read_times(run_dir)).verdicts
    )


def slow_or_failed(run_dir: Path) -> frozenset[str]:
    """Return the traces of all slow and failed attempts. Raises LedgerRefused."""
    run_id = identity_of(directory := RunDirectory.at(run_dir))
    with rows_of(directory.path) as rows:
        failed = [(each.rollout_id, each.attempt) for each in rows.ends() if each.cause in FAILED]
    return slow_traces(run_dir).union(trace_id_text(run_id, *each) for each in failed)
