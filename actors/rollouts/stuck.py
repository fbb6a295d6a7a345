"""Watch over the rollouts of one worker: each that takes far longer than its cohort is named once.

Invariants:
- The cohort is the ended attempts at the same task and for the same purpose in this process; with fewer than `FEW`,
  those at all tasks. Without `FEW` ended attempts nothing is stuck.
- Memory is bounded by `REMEMBERED` attempts for each purpose and task, and by `MAX_TASKS` tasks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Final

import numpy as np

from headrace.actors.record.files.running import FEW, STUCK
from headrace.buffer.trajectories.types import RolloutOrder

REMEMBERED: Final = 256
MAX_TASKS: Final = 1024


class StuckWatch:
    """Durations of ended attempts, and the attempts that have been named."""

    def __init__(self) -> None:
        self._ended: OrderedDict[tuple[str, str], deque[float]] = OrderedDict()
        self._p95_s: dict[tuple[str, str], float] = {}
        """That of each cohort since an attempt of it last ended: it is asked for each running rollout."""
        self._named: set[tuple[str, int]] = set()

    def ended(self, order: RolloutOrder, seconds: float | None) -> None:
        """Count an attempt that has ended with a result after `seconds`; None for one without a result."""
        self._named.discard((order.rollout_id, order.attempt))
        if seconds is None:
            return
        for task in (order.task_id, ""):
            known = self._ended.setdefault((order.purpose, task), deque(maxlen=REMEMBERED))
            known.append(seconds)
            self._p95_s.pop((order.purpose, task), None)
            self._ended.move_to_end((order.purpose, task))
        while len(self._ended) > MAX_TASKS:
            cohort, _ = self._ended.popitem(last=False)
            self._p95_s.pop(cohort, None)

    def p95_s(self, order: RolloutOrder) -> float | None:
        """Return the 95th percentile of the attempt's cohort in seconds; None if too few have ended."""
        for task in (order.task_id, ""):
            cohort = (order.purpose, task)
            known = self._ended.get(cohort, ())
            if len(known) >= FEW:
                if cohort not in self._p95_s:
                    self._p95_s[cohort] = float(np.quantile(known, 0.95))
                return self._p95_s[cohort]
        return None

    def warning(self, order: RolloutOrder, seconds: float, part: str, part_s: float) -> str | None:
        """Return a line about an attempt that has just become stuck after `seconds`; None if it is not, or was named
        before."""
        key = (order.rollout_id, order.attempt)
        if key in self._named or (p95_s := self.p95_s(order)) is None or seconds <= STUCK * p95_s:
            return None
        self._named.add(key)
        return (
            f"rollout {order.rollout_id} attempt {order.attempt} has taken {seconds:.1f} s, more than {STUCK:g} times "
            f"the p95 of its cohort ({p95_s:.1f} s): it has been in {part} for {part_s:.1f} s (task {order.task_id})"
        )
