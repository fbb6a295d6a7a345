"""Interventions by operators in a stopped run; each is recorded in the ledger's journal.

Invariants:
- No step of the surviving path is touched: the hash chain, the trained rollouts and the statistics of sealed groups
  stay as they are.
- A dropped batch is never issued again, and none of its members is trained: they end as filtered (`batch_dropped`).
- A lost result costs its rollout a new attempt and nothing else: it counts neither as a failure nor as an eviction. A
  member of a sealed group keeps its baseline and its first reward; one of an open group counts as unfinished again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.buffer.core.batch_queue import BatchQueue
from headrace.buffer.core.records import (
    AttemptRecord,
    BatchRecord,
    BatchState,
    FilterReason,
    GroupState,
    InterventionRecord,
    OperatorAction,
    RolloutState,
)
from headrace.buffer.core.sealing import Sealing
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.errors import LeaseError, TaskNotParked
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.types import BatchId, Cause, RolloutId


class Interventions:
    """The side of the buffer that faces operators."""

    def __init__(self, state: ReplayState, queue: BatchQueue, sealing: Sealing, history: TaskHistory) -> None:
        self._state, self._queue, self._sealing, self._history = state, queue, sealing, history

    def drop_batch(self, batch_id: BatchId | None, now: float) -> BatchRecord:
        """Drop a batch that is leased or queued; None: the one that the learner held when it died. Raises LeaseError,
        in which case nothing is changed."""
        if not batch_id:
            held = self._state.path.leases()
            if len(held) != 1:
                raise LeaseError(
                    f"the learner held {len(held)} batches when the run ended: name the one to drop "
                    f"({self._droppable()})"
                )
            batch_id = held[0].batch_id
        batch = self._state.path.batches.get(batch_id)
        if batch is None or batch.state not in (BatchState.LEASED, BatchState.QUEUED):
            raise LeaseError(
                f"{batch_id} is {batch.state if batch else 'no open batch of this ledger'}: only a batch that is "
                f"leased or waits to be issued again can be dropped ({self._droppable()})"
            )
        was = f"{batch.state}, to be trained at {batch.version}"
        dropped = replace(batch, state=BatchState.DROPPED, queue_order=None)
        self._state.put(dropped)
        for member in batch.members:
            self._state.move(member.rollout_id, RolloutState.FILTERED, reason=FilterReason.BATCH_DROPPED)
        self._state.count("batches_dropped")
        self._state.count(f"filtered_{FilterReason.BATCH_DROPPED}", len(batch.members))
        self._note(OperatorAction.DROP_BATCH, batch.batch_id, None, f"{was}; {len(batch.members)} rollouts", now)
        return dropped

    def retry_lost(self, lost: Mapping[RolloutId, str], now: float) -> tuple[RolloutId, ...]:
        """Reissue rollouts whose results are lost; the values of `lost` say why. Trained rollouts stay trained. Return
        the rollouts that get a new attempt. Steps that a new learner would train again on lost rollouts must have been
        undone beforehand."""
        known = {rollout_id: why for rollout_id, why in lost.items() if rollout_id in self._state.rollouts}
        for batch in (*self._state.path.leases(), *self._state.path.queue()):
            if any(member.rollout_id in known for member in batch.members):
                self._queue.dissolve(batch)
        again = []
        for rollout_id, why in sorted(known.items()):
            rollout = self._state.rollouts[rollout_id]
            if rollout.state in (RolloutState.WAITING, RolloutState.SEALED):
                self._note(OperatorAction.RETRY_LOST, rollout_id, rollout.attempt, f"{rollout.state}: {why}", now)
                group = self._state.group_of(rollout_id)
                if group.state is GroupState.OPEN:
                    self._unfinish(rollout_id, now)
                    self._sealing.watch(group.group_id)
                else:
                    # The group was sealed with this result: its reward continues to count.
                    self._state.put(self._as_counted(rollout_id))
                    self._state.move(
                        rollout_id, RolloutState.PENDING, reward=None, advantage=None, turn_advantages=None
                    )
                again.append(rollout_id)
            elif rollout.state is RolloutState.TRAINED:
                self._note(OperatorAction.RETRY_LOST, rollout_id, rollout.attempt, f"stays trained: {why}", now)
        if again:
            self._state.count("rollouts_retried", len(again))
        return tuple(again)

    def retry_batches(self) -> None:
        """Reset the tries of all batches, once the cause of the learners' deaths has been removed."""
        for batch in (*self._state.path.leases(), *self._state.path.queue()):
            self._state.put(replace(batch, tries=0, failure=""))

    def unpark(self, tasks: Sequence[str] | None, now: float) -> tuple[TaskId, ...]:
        """Release parked tasks (None: all of them) with a clean record. Raises TaskNotParked, in which case nothing is
        changed."""
        parked = dict(self._state.parked)
        chosen = list(parked) if tasks is None else [TaskId(task) for task in dict.fromkeys(tasks)]
        if strangers := [task for task in chosen if task not in parked]:
            raise TaskNotParked(
                f"{strangers[0]} is not parked: `headrace status RUN --parked` lists those that are "
                f"({', '.join(sorted(parked)[:5]) or 'none'}{', ...' if len(parked) > 5 else ''})"
            )
        for task in chosen:
            self._note(OperatorAction.UNPARK, task, None, parked[task], now)
            self._history.release(task)
        return tuple(chosen)

    def _droppable(self) -> str:
        batches = [batch.batch_id for batch in (*self._state.path.leases(), *self._state.path.queue())]
        return f"now: {', '.join(batches)}" if batches else "now: none"

    def _unfinish(self, rollout_id: RolloutId, now: float) -> None:
        """Reissue a member of an open group: its old reward no longer counts in the task's history."""
        attempt = self._as_counted(rollout_id)
        self._history.unfinished(self._state.group_of(rollout_id).task_id, attempt)
        self._state.put(
            replace(
                attempt,
                ended_at_s=attempt.ended_at_s or now,
                offered=False,
                cause=Cause.CANCELLED,
                reward=None,
                solved=False,
                trainable=False,
                detail="its result was lost",
                trained=(),
                scores=None,
            )
        )
        self._state.move(rollout_id, RolloutState.PENDING, reward=None, first_reward=None, first_values=None)

    def _as_counted(self, rollout_id: RolloutId) -> AttemptRecord:
        """Return the attempt as the buffer counted it. If a result was acknowledged but never reached the disk, only
        the rollout's own row remains."""
        attempt, rollout = self._state.attempts[rollout_id], self._state.rollouts[rollout_id]
        if attempt.offered:
            return attempt
        solved = (rollout.reward or 0.0) > 0
        return replace(
            attempt,
            ended_at_s=self._state.group_of(rollout_id).ended_at_s,
            offered=True,
            cause=Cause.SOLVED if solved else Cause.FAILED,
            reward=rollout.reward,
            solved=solved,
            detail="acknowledged and lost",
        )

    def _note(self, action: OperatorAction, subject: str, attempt: int | None, detail: str, now: float) -> None:
        sequence = max(self._state.interventions, default=0) + 1
        self._state.put(
            InterventionRecord(
                sequence=sequence, action=action, subject=subject, attempt=attempt, detail=detail, at_s=now
            )
        )
