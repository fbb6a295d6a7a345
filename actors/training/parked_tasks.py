"""What a run says of tasks that are not issued any more, because their rollouts died again and again.

Invariant: a data set that is used up is an end in order; one of which every task is parked is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.actors.errors import TasksParked

if TYPE_CHECKING:
    from collections.abc import Mapping

    from headrace.buffer.tasks import TaskId


def parked_line(parked: Mapping[TaskId, str]) -> str:
    """How many are parked, and the last one with its failure; empty when none is."""
    if not parked:
        return ""
    task, failure = list(parked.items())[-1]
    return f"{len(parked)} {'task is' if len(parked) == 1 else 'tasks are'} parked, last {task}: {failure}"


def refuse_all_parked(parked: Mapping[TaskId, str], *, tasks: int, step: int) -> None:
    """For a run that gets no further batch after `step` optimizer updates. Raises TasksParked when none of its tasks is
    left."""
    if len(parked) == tasks:
        raise TasksParked(
            f"no task is left to train on after {step} steps: {parked_line(parked)}; `headrace report` names the "
            "failure of each: mend it, release them with `headrace tasks unpark RUN --all`, and resume; or start a "
            "new run with a larger buffer.max_attempts or buffer.park_after"
        )
