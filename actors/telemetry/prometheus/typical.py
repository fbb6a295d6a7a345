"""Typical durations of attempts, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

import numpy as np

from headrace.actors.record.files.running import FEW

TASKS: Final = 2048
"""Number of tasks whose durations are remembered; those that ended longest ago are forgotten first."""
OF_A_TASK: Final = 64
OF_ALL: Final = 4096


class TypicalTimes:
    """Durations of the newest attempts that ended with a reward: by task, and of all."""

    def __init__(self) -> None:
        self._by_task: OrderedDict[str, deque[float]] = OrderedDict()
        self._all: deque[float] = deque(maxlen=OF_ALL)

    def add(self, task: str, seconds: float) -> None:
        """Add an attempt."""
        of_task = self._by_task.pop(task, None) or deque(maxlen=OF_A_TASK)
        of_task.append(seconds)
        self._by_task[task] = of_task
        if len(self._by_task) > TASKS:
            self._by_task.popitem(last=False)
        self._all.append(seconds)

    def p95_s(self, task: str) -> float | None:
        """Return the 95th percentile of a task; that of all attempts if fewer than `FEW` of the task are known; None
        before the first attempt."""
        known = self._by_task.get(task, ())
        chosen = known if len(known) >= FEW else self._all
        return float(np.quantile(chosen, 0.95)) if chosen else None
