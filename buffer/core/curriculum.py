"""Which task the next group is of.

Invariants:
- Each pass opens each task once, but for parked ones; the next pass begins when the last task of this one was opened.
- What comes next depends on the seed and on the task records, hence on the ledger only: a resumed run goes on as the
  first one would have.
- A curriculum chooses among the next few tasks of the pass; it starves none.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from headrace.buffer.core.records import TaskRecord
    from headrace.buffer.core.state import ReplayState
    from headrace.buffer.core.task_stream import TaskStream
    from headrace.buffer.tasks import TaskId

Curriculum = Literal["none", "frontier"]
WINDOW: Final = 8
"""Tasks of the pass that `frontier` chooses among."""


class TaskCursor:
    """The position in the passes over the data; `passes` of them, or endless."""

    def __init__(self, state: ReplayState, stream: TaskStream, *, curriculum: Curriculum, passes: int | None) -> None:
        self._state, self._stream = state, stream
        self._curriculum, self._passes = curriculum, passes
        self._begin(max((task.last_pass for task in state.tasks.values()), default=0))

    def left(self) -> int | None:
        """How many more groups may be opened; None: no end."""
        self._skip_parked()
        able = len(self._stream) - len(self._state.parked)
        if self._passes is None and able:
            return None
        return len(self._remaining) + able * max(0, (self._passes or 0) - self._lap - 1)

    def next(self) -> tuple[TaskId, int] | None:
        """The next task and the pass it is of, taken from that pass; None when there is none."""
        if self.left() == 0:
            return None
        if not self._remaining:
            self._begin(self._lap + 1)
            self._skip_parked()
        place = self._choose()
        task_id = self._remaining[place]
        del self._remaining[place]
        return task_id, self._lap

    def _begin(self, lap: int) -> None:
        self._lap = lap
        self._remaining = deque(task for task in self._stream.order(lap) if self._state.task(task).last_pass < lap)
        self._parked: tuple[TaskId, ...] | None = None

    def _skip_parked(self) -> None:
        if self._parked != (parked := tuple(self._state.parked)):
            self._parked = parked
            self._remaining = deque(task for task in self._remaining if task not in self._state.parked)

    def _choose(self) -> int:
        if self._curriculum == "none":
            return 0
        window = islice(self._remaining, WINDOW)
        distances = [abs(success(self._state.task(task)) - 0.5) for task in window]
        return distances.index(min(distances))


def success(task: TaskRecord) -> float:
    """Estimated share of its rollouts that are solved; 0.5 when nothing is known (Laplace's rule of succession)."""
    return (task.solved + 1) / (task.finished + 2)
