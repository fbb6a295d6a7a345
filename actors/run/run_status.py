"""Status of a run, read from its directory without contacting any process."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headrace.actors.engines.members_file import read_roster
from headrace.actors.record.files.absences import read_absences
from headrace.actors.record.files.metrics import each_metric, last_metric
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.run_state import RunState, run_state
from headrace.actors.record.storage.ledger_copies import read_outcome
from headrace.buffer.audit.condition import read_condition
from headrace.buffer.core.outages import utc
from headrace.buffer.errors import LedgerRefused
from headrace.policies.learners.checkpoints import ASIDE

if TYPE_CHECKING:
    from headrace.actors.run.config import RunConfig


def status_of(config: RunConfig, directory: RunDirectory) -> dict[str, Any]:
    """Return the document of `headrace status --json`."""
    try:
        condition = read_condition(directory.path)
        outages = [f"{outage.reason}, since {utc(outage.since_s)}" for outage in condition.outages]
        held, parked, sources = "; ".join(outages), len(condition.parked), condition.sources
    except LedgerRefused as error:
        # An unreadable ledger is reported in place of the reason why no rollouts are issued.
        held, parked, sources = str(error), 0, ()
    step = last_metric(directory.metrics, "step")
    evaluations = each_metric(directory.metrics, ("evaluation",))
    state = run_state(directory)
    return {
        "run": str(directory.path),
        "state": state.value,
        "driven": state is RunState.RUNNING,
        "steps": step["step"] if step else 0,
        "total_steps": config.training.steps,
        "version": step["version"] if step else None,
        "reward": step["reward"] if step else None,
        "held_out": {record["tag"]: record["success"] for record in evaluations},
        "engines": [asdict(engine) for engine in read_roster(directory.engines).engines],
        "finished": state is RunState.FINISHED,
        "checkpoints_left_out": sorted(path.name for path in directory.checkpoints.glob(f"{ASIDE}*")),
        "ledger_copy": None if (copied := read_outcome(directory.path)) is None else asdict(copied),
        "absent": [asdict(one) for one in read_absences(directory.path)] if state is RunState.RUNNING else [],
        "held": held,
        "parked": parked,
        "sources": {source.name: asdict(source) for source in sources},
    }
