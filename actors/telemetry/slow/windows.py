"""When the phase of a part was, for all rollouts at once: before the agent, while it worked, or in the evaluation.

Invariant: a breakdown has lengths and not positions, so a window is the phase of a part and may be longer than it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headrace.actors.telemetry.slow.cohort import Cohorts
from headrace.actors.telemetry.slow.rows import (
    DISPATCH,
    EARLIER_ATTEMPTS,
    RUNNING,
    STALENESS_WAIT,
    UNATTRIBUTED,
    is_of_evaluation,
)
from headrace.buffer.trajectories.breakdown import BEFORE_AGENT

Floats = NDArray[np.float64]


class Windows:
    """Phases of all rollouts of a run, in Unix time."""

    def __init__(self, cohorts: Cohorts) -> None:
        rows = cohorts.rows
        self._issued_s: Floats = np.array([row.issued_at_s for row in rows], dtype=np.float64)
        self._last_issued_s: Floats = np.array([row.last_issued_at_s for row in rows], dtype=np.float64)
        self._end_s = self._issued_s + cohorts.totals

        def summed(belongs: Callable[[str], bool]) -> Floats:
            columns = [column for part, column in cohorts.column.items() if belongs(part)]
            total: Floats = cohorts.seconds[:, columns].sum(axis=1)
            return total

        dispatch_s = summed(lambda part: part == DISPATCH)
        before_s = summed(lambda part: part in BEFORE_AGENT)
        self._agent_s = np.minimum(self._end_s, self._last_issued_s + before_s + dispatch_s)
        evaluation_s = summed(is_of_evaluation)
        self._agent_end_s = np.maximum(self._agent_s, self._end_s - evaluation_s)
        self._evaluation_s = np.maximum(self._last_issued_s, self._end_s - evaluation_s - dispatch_s)

    def of(self, part: str) -> tuple[Floats, Floats]:
        """Return begin and end of the phase of this part, each of shape (rows,)."""
        if part in (EARLIER_ATTEMPTS, STALENESS_WAIT):
            return self._issued_s, self._last_issued_s
        if part in (DISPATCH, UNATTRIBUTED, RUNNING):
            return self._last_issued_s, self._end_s
        if is_of_evaluation(part):
            return self._evaluation_s, self._end_s
        if part in BEFORE_AGENT:
            return self._last_issued_s, self._agent_s
        return self._agent_s, self._agent_end_s
