"""The messages about parked tasks, which are not issued any more because their rollouts failed repeatedly.

Invariant: a run whose data set is used up ends normally; a run whose tasks are all parked ends with an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.actors.errors import TasksParked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.buffer.tasks import TaskId


def parked_line(parked: Mapping[TaskId, str]) -> str:
    """Return how many tasks are parked, and the last one with its failure; empty when none is."""
    if not parked:
        return ""
    task, failure = list(parked.items())[-1]
    return f"{len(parked)} {'task is' if len(parked) == 1 else 'tasks are'} parked, last {task}: {failure}"


def refuse_all_parked(parked: Mapping[TaskId, str], *, tasks: int, step: int) -> None:
    """Raise TasksParked when all tasks of a run, which gets no further batch after `step` optimizer updates, are
    parked."""
    if len(parked) == tasks:
        raise TasksParked(
            f"no task is left to train on after {step} steps: {parked_line(parked)}; `headrace report` names the "
            "failure of each: fix it, release them with `headrace tasks unpark RUN --all`, and resume; or start a "
            "new run with a larger buffer.max_attempts or buffer.park_after"
        )
