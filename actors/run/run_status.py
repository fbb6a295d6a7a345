"""What a run directory tells about its run: pure reading, no process is touched."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

from headrace.actors.engine_group.members_file import read_roster
from headrace.actors.record.metrics import each_metric, last_metric
from headrace.buffer.audit.condition import read_condition
from headrace.buffer.core.outages import utc
from headrace.buffer.errors import LedgerRefused
from headrace.policies.learners.checkpoints import ASIDE

if TYPE_CHECKING:
    from headrace.actors.record.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig


class RunState(StrEnum):
    """Where a run stands."""

    NEW = "new"
    """It was made, and nobody drove it yet."""
    RUNNING = "running"
    """A process drives it now."""
    FINISHED = "finished"
    """Its steps are done, or its data is used up."""
    DRAINED = "drained"
    """It was interrupted, saved and closed: `headrace resume`."""
    STOPPED = "stopped"
    """Its driver failed or was killed: `headrace resume`."""


def run_state(directory: RunDirectory) -> RunState:
    """From the lock and the summary, which a driver removes when it begins."""
    if directory.is_driven():
        return RunState.RUNNING
    try:
        completed = bool(orjson.loads(directory.summary.read_bytes())["completed"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return RunState.STOPPED if directory.sessions.exists() else RunState.NEW
    return RunState.FINISHED if completed else RunState.DRAINED


def status_of(config: RunConfig, directory: RunDirectory) -> dict[str, Any]:
    """The document of `headrace status --json`."""
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
        **_condition_of(directory),
    }


def _condition_of(directory: RunDirectory) -> dict[str, Any]:
    """Why orders are held, and how many tasks are parked, as the ledger says; one that cannot be read says so."""
    try:
        condition = read_condition(directory.path)
    except LedgerRefused as error:
        return {"held": str(error), "parked": 0}
    held = [f"{outage.reason}, since {utc(outage.since_s)}" for outage in condition.outages]
    return {"held": "; ".join(held), "parked": len(condition.parked)}
