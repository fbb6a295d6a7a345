"""Check that no held-out task is also a training task.

Invariant: two tasks are the same problem when everything but their id and family is equal: renaming a task does not
make it held-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.actors.errors import ConfigError
from headrace.buffer.tasks.task import Task, TaskId, task_digest

MAX_NAMED, MAX_ID_CHARACTERS = 5, 80


def refuse_overlap(
    train: Sequence[Task], held_out: Sequence[Task], source: str, *, trained_by: str = "tasks.train"
) -> None:
    """Raise ConfigError with `source` (a key or an option) and the ids if any task is in both sets. `trained_by` is the
    key of the training tasks."""
    trained = {_problem(task) for task in train}
    both = [task.id for task in held_out if _problem(task) in trained]
    if both:
        names = ", ".join(repr(task_id[:MAX_ID_CHARACTERS]) for task_id in both[:MAX_NAMED])
        rest = f" and {len(both) - MAX_NAMED} more" if len(both) > MAX_NAMED else ""
        raise ConfigError(
            f"{source}: {len(both)} tasks are also in {trained_by} ({names}{rest}); remove them from one of the files"
        )


def _problem(task: Task) -> str:
    return task_digest(replace(task, id=TaskId(""), family=""))
