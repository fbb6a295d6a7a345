"""Names in which a source of tasks shows.

Invariant: the id of a task begins with the name of its source (`search/17`), so that every row of the ledger shows its
source. In a run without sources ids have no such prefix.
"""

from __future__ import annotations

from typing import Final

from headrace.buffer.tasks.task import TaskId

SEPARATOR: Final = "/"
"""Sign between the name of a source and the id that its task file gives a task."""


def id_in_run(source: str, task_id: str) -> TaskId:
    """Return the id that a task has in the run: its own, after the name of its source if that has one."""
    return TaskId(f"{source}{SEPARATOR}{task_id}" if source else task_id)


def ended_counter(source: str, state: str) -> str:
    """Return the name of the ledger's counter of a source's rollouts that ended in a final state."""
    return f"{source}{SEPARATOR}{state}"


def source_name(task_id: str) -> str:
    """Return the name of a task's source, in a run that has sources."""
    return task_id.partition(SEPARATOR)[0]
