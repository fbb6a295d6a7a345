"""The order of training tasks.

Invariants:
- `task(ordinal)` depends on the seed, the ordinal and the tasks only: a cursor is one number, and a resumed run
  continues the order.
- Each pass over the tasks is a permutation of its own; the stream never ends.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.tasks import Task, TaskId


class TaskStream:
    """Tasks by ordinal (from 0), endless. ValueError without tasks or with a repeated id."""

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        if not tasks:
            raise ValueError("there are no training tasks: give a task file with at least one line")
        self._tasks = tuple(tasks)
        self._by_id = {task.id: task for task in tasks}
        if len(self._by_id) != len(self._tasks):
            raise ValueError("task ids repeat: each training task needs an id of its own")
        self._seed = seed
        self._pass = -1
        self._order: list[int] = []

    def task(self, ordinal: int) -> Task:
        """The task at this position of the stream."""
        lap, position = divmod(ordinal, len(self._tasks))
        if lap != self._pass:
            self._order = list(range(len(self._tasks)))
            random.Random(f"headrace tasks {self._seed} {lap}").shuffle(self._order)
            self._pass = lap
        return self._tasks[self._order[position]]

    def by_id(self, task_id: TaskId) -> Task:
        """KeyError when the stream has no such task."""
        return self._by_id[task_id]

    def digest(self) -> str:
        """SHA-256 over seed and ids in order: what a resumed run must find again."""
        lines = [str(self._seed), *(task.id for task in self._tasks)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
