"""State of a run, derived from its directory without contacting any process."""

from __future__ import annotations

from enum import StrEnum

import orjson

from headrace.actors.record.files.run_directory import RunDirectory


class RunState(StrEnum):
    """State of a run."""

    NEW = "new"
    """The directory exists, and no process has driven the run yet."""
    RUNNING = "running"
    """A process is driving the run."""
    FINISHED = "finished"
    """All steps are done, or the data is used up."""
    DRAINED = "drained"
    """The run was interrupted and saved; continue with `headrace resume`."""
    STOPPED = "stopped"
    """The driver failed or was killed; continue with `headrace resume`."""


def run_state(directory: RunDirectory) -> RunState:
    """Derive the state from the lock and the summary, which a driver removes when it starts."""
    if directory.is_driven():
        return RunState.RUNNING
    try:
        completed = bool(orjson.loads(directory.summary.read_bytes())["completed"])
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return RunState.STOPPED if directory.sessions.exists() else RunState.NEW
    return RunState.FINISHED if completed else RunState.DRAINED
