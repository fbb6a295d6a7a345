"""The order in which training tasks get their groups: passes over the data, and curricula.

Invariants:
- Each pass has its own permutation, which depends only on the seed, the pass number and the tasks.
- Each pass opens each task once, except parked ones; the next pass begins once the last task of this one has been
  opened.
- The next task depends only on the seed and the task records, hence only on the ledger: a resumed run continues as the
  original one would have.
- A curriculum chooses among the next few tasks of the pass, and no task is starved.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, Literal

from headrace.buffer.core.records import TaskRecord
from headrace.buffer.core.source_names import source_name
from headrace.buffer.core.state import ReplayState
from headrace.buffer.tasks.task import Task, TaskId

Curriculum = Literal["none", "frontier"]
WINDOW: Final = 8
"""Number of tasks of the pass that `frontier` chooses among."""


class TaskStream:
    """The training tasks, in a different order for each pass. Raises ValueError if there are no tasks or an id is
    duplicated."""

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        if not tasks:
            raise ValueError("there are no training tasks: give a task file with at least one line")
        self._tasks = tuple(tasks)
        self._ids = frozenset(task.id for task in tasks)
        if len(self._ids) != len(self._tasks):
            raise ValueError("duplicate task ids: each training task needs an id of its own")
        self._seed = seed

    def __len__(self) -> int:
        return len(self._tasks)

    def order(self, lap: int) -> list[TaskId]:
        """Return the tasks of a pass (from 0), in order."""
        order = [task.id for task in self._tasks]
        random.Random(f"headrace tasks {self._seed} {lap}").shuffle(order)
        return order

    def digest(self) -> str:
        """Return the SHA-256 over the seed and the ids in order, which must be the same in a resumed run."""
        lines = [str(self._seed), *(task.id for task in self._tasks)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def of_source(self, name: str) -> TaskStream:
        """Return the tasks of one source; all of them for the source without a name. Raises ValueError if the source
        has none."""
        own = [task for task in self._tasks if source_name(task.id) == name]
        if name and not own:
            raise ValueError(f"source {name} has no training tasks: give it a task file with at least one line")
        return TaskStream(own, seed=self._seed) if name else self

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._ids


class TaskCursor:
    """Position in the passes over the data. The number of passes is `passes`, or unlimited if that is None."""

    def __init__(self, state: ReplayState, stream: TaskStream, *, curriculum: Curriculum, passes: int | None) -> None:
        self._state, self._stream = state, stream
        self._curriculum, self._passes = curriculum, passes
        known = (task.last_pass for task in state.tasks.values() if task.task_id in stream)
        self._begin(max(known, default=0))

    def left(self) -> int | None:
        """Return how many more groups may be opened; None: unlimited."""
        self._skip_parked()
        able = len(self._stream) - len(self._parked)
        if self._passes is None and able:
            return None
        return len(self._remaining) + able * max(0, (self._passes or 0) - self._lap - 1)

    def next(self) -> tuple[TaskId, int] | None:
        """Remove and return the next task, with the number of its pass; None when there is none."""
        if self.left() == 0:
            return None
        if not self._remaining:
            self._begin(self._lap + 1)
            self._skip_parked()
        place = 0
        if self._curriculum == "frontier":
            window = islice(self._remaining, WINDOW)
            distances = [abs(success(self._state.task(task)) - 0.5) for task in window]
            place = distances.index(min(distances))
        task_id = self._remaining[place]
        del self._remaining[place]
        return task_id, self._lap

    def _begin(self, lap: int) -> None:
        self._lap = lap
        self._remaining = deque(task for task in self._stream.order(lap) if self._state.task(task).last_pass < lap)
        self._parked: tuple[TaskId, ...] = ()

    def _skip_parked(self) -> None:
        if self._parked != (parked := tuple(task for task in self._state.parked if task in self._stream)):
            self._parked = parked
            self._remaining = deque(task for task in self._remaining if task not in self._state.parked)


def success(task: TaskRecord) -> float:
    """Return the estimated share of a task's rollouts that are solved (Laplace's rule of succession); 0.5 when nothing
    is known."""
    return (task.solved + 1) / (task.finished + 2)
