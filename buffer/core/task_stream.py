"""The order of training tasks.

Invariants:
- The order of a pass depends on the seed, the number of the pass and the tasks only: a resumed run finds it again.
- Each pass over the tasks is a permutation of its own; there is always a next one.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.tasks import Task, TaskId


class TaskStream:
    """Tasks in passes. ValueError without tasks or with a repeated id."""

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        if not tasks:
            raise ValueError("there are no training tasks: give a task file with at least one line")
        self._tasks = tuple(tasks)
        if len({task.id for task in tasks}) != len(self._tasks):
            raise ValueError("task ids repeat: each training task needs an id of its own")
        self._seed = seed

    def __len__(self) -> int:
        return len(self._tasks)

    def order(self, lap: int) -> list[TaskId]:
        """The tasks of a pass (from 0), in the order in which they come."""
        order = [task.id for task in self._tasks]
        random.Random(f"headrace tasks {self._seed} {lap}").shuffle(order)
        return order

    def digest(self) -> str:
        """SHA-256 over seed and ids in order: what a resumed run must find again."""
        lines = [str(self._seed), *(task.id for task in self._tasks)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
