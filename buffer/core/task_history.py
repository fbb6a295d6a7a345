"""The history of each task, written on every change so that it survives restarts and the closing of groups.

Invariants:
- Statistics of rewards come from complete groups only: those whose members all finished or are poison. Groups that a
  rule sealed early would bias them.
- A task is parked when its members have become poison `park_after` times in a row, with failures on different hosts at
  different times: no more groups of it are opened until it is released.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from headrace.buffer.core.advantages import AdvantageKind, deviation_square_sum, deviation_sum
from headrace.buffer.core.records import AttemptRecord, Charge, HostFailures
from headrace.buffer.core.state import ReplayState
from headrace.buffer.tasks.task import TaskId

HOSTS_KEPT: Final = 8
"""Maximum number of hosts whose failures are remembered for one task."""


class TaskHistory:
    """Updates the task records."""

    def __init__(self, state: ReplayState, *, park_after: int) -> None:
        self._state, self._park_after = state, park_after

    def opened(self, task_id: TaskId, lap: int) -> None:
        """Record that a group of a task was opened in this pass."""
        task = self._state.task(task_id)
        self._state.put(replace(task, groups=task.groups + 1, last_pass=lap))

    def finished(self, task_id: TaskId, attempt: AttemptRecord) -> None:
        """Record that an attempt ended with a reward."""
        task = self._state.task(task_id)
        self._state.put(
            replace(
                task,
                finished=task.finished + 1,
                solved=task.solved + attempt.solved,
                duration_s=task.duration_s + max(0.0, (attempt.ended_at_s or 0.0) - attempt.issued_at_s),
                poison_streak=0,
                failed_on=(),
            )
        )

    def unfinished(self, task_id: TaskId, attempt: AttemptRecord) -> None:
        """Record that the result of a finished attempt was lost before its group was sealed."""
        task = self._state.task(task_id)
        self._state.put(
            replace(
                task,
                finished=task.finished - 1,
                solved=task.solved - attempt.solved,
                duration_s=max(0.0, task.duration_s - max(0.0, (attempt.ended_at_s or 0.0) - attempt.issued_at_s)),
            )
        )

    def failed_on(self, task_id: TaskId, host: str, now: float) -> tuple[HostFailures, ...]:
        """Return the hosts on which a task has failed since it last finished, including a failure on `host` now."""
        return with_failure(self._state.task(task_id).failed_on, host, now)

    def failed(self, task_id: TaskId, attempt: AttemptRecord, *, poison: bool) -> None:
        """Record that an attempt ended without a reward; `poison` means that it was the member's last attempt."""
        task = self._state.task(task_id)
        if attempt.charged_to not in (Charge.TASK, Charge.HOST):
            self._state.put(replace(task, infra=task.infra + 1, poison=task.poison + poison))
            return
        now = attempt.ended_at_s or 0.0
        streak = task.poison_streak + poison
        parked = task.parked or (attempt.charged_to is Charge.TASK and streak >= self._park_after)
        parks = parked and not task.parked
        if parks:
            self._state.count("tasks_parked")
        self._state.put(
            replace(
                task,
                infra=task.infra + 1,
                poison=task.poison + poison,
                poison_streak=streak,
                parked=parked,
                parked_at_s=now if parks else task.parked_at_s,
                last_failure=attempt.detail or f"{attempt.cause}",
                failed_on=with_failure(task.failed_on, attempt.host, now),
            )
        )

    def forgive(self, task_id: TaskId, *, since_s: float) -> None:
        """Clear the failures of a task since `since_s`, because the system caused them. If the task was parked because
        of them, release it."""
        task = self._state.task(task_id)
        if not task.parked:
            self._state.put(replace(task, poison_streak=0, failed_on=()))
        elif task.parked_at_s is not None and task.parked_at_s >= since_s:
            self.release(task_id)

    def release(self, task_id: TaskId) -> bool:
        """Unpark a task and clear its failures. Return False when it is not parked."""
        task = self._state.task(task_id)
        if not task.parked:
            return False
        self._state.count("tasks_released")
        self._state.put(replace(task, parked=False, parked_at_s=None, poison_streak=0, failed_on=()))
        return True

    def evicted(self, task_id: TaskId) -> None:
        """Record that a rollout of a task exceeded the staleness bound."""
        task = self._state.task(task_id)
        self._state.put(replace(task, evicted=task.evicted + 1))

    def cancelled(self, task_id: TaskId) -> None:
        """Record that a rollout of a task was aborted when its group was sealed."""
        task = self._state.task(task_id)
        self._state.put(replace(task, cancelled=task.cancelled + 1))

    def completed(self, task_id: TaskId, rewards: Sequence[float], kind: AdvantageKind | None) -> None:
        """Record that a group of a task, sealed with this kind of advantages, is complete, with these rewards of its
        members."""
        task = self._state.task(task_id)
        by_grpo = kind == "grpo"
        self._state.put(
            replace(
                task,
                complete_members=task.complete_members + len(rewards),
                reward_sum=task.reward_sum + math.fsum(rewards),
                reward_square_sum=task.reward_square_sum + math.fsum(reward**2 for reward in rewards),
                grpo_square_sum=task.grpo_square_sum + by_grpo * deviation_square_sum(rewards),
                grpo_deviation_sum=task.grpo_deviation_sum + by_grpo * deviation_sum(rewards),
            )
        )


def with_failure(failures: tuple[HostFailures, ...], host: str, now: float) -> tuple[HostFailures, ...]:
    """Return the failures with one more; a failure on an unknown host is ignored."""
    if not host:
        return failures
    known = next((item for item in failures if item.host == host), HostFailures(host, now, now))
    others = [item for item in failures if item.host != host]
    return (*others, replace(known, last_at_s=now))[-HOSTS_KEPT:]
