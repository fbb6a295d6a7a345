"""What is remembered of tasks: written with each change, so that it survives restarts and closed groups.

Invariants:
- Statistics of rewards come from complete groups only: those whose members all finished or are poison. What a rule
  left out would bias them.
- A task whose members became poison `park_after` times in a row is parked: no more groups of it are opened.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.buffer.advantages import deviation_square_sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.records import AttemptRecord
    from headrace.buffer.state import ReplayState
    from headrace.buffer.tasks import TaskId


class TaskHistory:
    """Keeps the task records."""

    def __init__(self, state: ReplayState, *, park_after: int) -> None:
        self._state, self._park_after = state, park_after

    def opened(self, task_id: TaskId, lap: int) -> None:
        """A group of it was opened in this pass."""
        task = self._state.task(task_id)
        self._state.put(replace(task, groups=task.groups + 1, last_pass=lap))

    def finished(self, task_id: TaskId, attempt: AttemptRecord) -> None:
        """An attempt ended with a reward."""
        task = self._state.task(task_id)
        self._state.put(
            replace(
                task,
                finished=task.finished + 1,
                solved=task.solved + attempt.solved,
                duration_s=task.duration_s + max(0.0, (attempt.ended_at_s or 0.0) - attempt.issued_at_s),
                poison_streak=0,
            )
        )

    def unfinished(self, task_id: TaskId, attempt: AttemptRecord) -> None:
        """The result of a finished attempt was lost before its group was sealed."""
        task = self._state.task(task_id)
        self._state.put(
            replace(
                task,
                finished=task.finished - 1,
                solved=task.solved - attempt.solved,
                duration_s=max(0.0, task.duration_s - max(0.0, (attempt.ended_at_s or 0.0) - attempt.issued_at_s)),
            )
        )

    def failed(self, task_id: TaskId, detail: str, *, poison: bool) -> None:
        """An attempt ended without a reward; with `poison` it was the member's last."""
        task = self._state.task(task_id)
        streak = task.poison_streak + poison
        parked = task.parked or streak >= self._park_after
        if parked and not task.parked:
            self._state.count("tasks_parked")
        self._state.put(
            replace(
                task,
                infra=task.infra + 1,
                poison=task.poison + poison,
                poison_streak=streak,
                parked=parked,
                last_failure=detail,
            )
        )

    def evicted(self, task_id: TaskId) -> None:
        """A rollout of it went over the staleness bound."""
        task = self._state.task(task_id)
        self._state.put(replace(task, evicted=task.evicted + 1))

    def cancelled(self, task_id: TaskId) -> None:
        """A rollout of it was aborted at the sealing of its group."""
        task = self._state.task(task_id)
        self._state.put(replace(task, cancelled=task.cancelled + 1))

    def completed(self, task_id: TaskId, rewards: Sequence[float]) -> None:
        """A sealed group of it is complete, with these rewards by member."""
        task = self._state.task(task_id)
        self._state.put(
            replace(
                task,
                complete_members=task.complete_members + len(rewards),
                reward_sum=task.reward_sum + math.fsum(rewards),
                reward_square_sum=task.reward_square_sum + math.fsum(reward**2 for reward in rewards),
                deviation_square_sum=task.deviation_square_sum + deviation_square_sum(rewards),
            )
        )
