"""What an operator may do to a run that nobody drives; each act is an entry of the ledger's journal.

Invariants:
- No step of the surviving path is touched: the hash chain, what was trained and the statistics of sealed groups stay.
- A dropped batch is never issued again, and none of its members is trained: they end as filtered (`batch_dropped`).
- A lost result costs its rollout a new attempt and nothing else: no failure, no eviction. A member of a sealed group
  keeps its baseline and its first reward; one of an open group has not finished any more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.buffer.core.records import Action, BatchState, FilterReason, GroupState, InterventionRecord, RolloutState
from headrace.buffer.errors import LeaseError, TaskNotParked
from headrace.buffer.tasks import TaskId
from headrace.buffer.types import Cause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from headrace.buffer.core.records import AttemptRecord, BatchRecord
    from headrace.buffer.core.sealing import Sealing
    from headrace.buffer.core.state import ReplayState
    from headrace.buffer.core.task_history import TaskHistory
    from headrace.buffer.types import BatchId, RolloutId


class Interventions:
    """The side of the buffer that faces operators."""

    def __init__(self, state: ReplayState, sealing: Sealing, history: TaskHistory) -> None:
        self._state, self._sealing, self._history = state, sealing, history

    def drop_batch(self, batch_id: BatchId | None, now: float) -> BatchRecord:
        """Drop a batch that is leased or waits to be issued again; None: the one that the learner held when it died.
        Raises LeaseError, with nothing changed."""
        batch = self._state.batches.get(batch_id) if batch_id else self._held()
        if batch is None or batch.state not in (BatchState.LEASED, BatchState.QUEUED):
            raise LeaseError(
                f"{batch_id} is {batch.state if batch else 'no open batch of this ledger'}: only a batch that is "
                f"leased or waits to be issued again can be dropped ({self._droppable()})"
            )
        held = f"{batch.state}, to be trained at {batch.version}"
        dropped = replace(batch, state=BatchState.DROPPED, queue_order=None)
        self._state.put(dropped)
        for member in batch.members:
            self._state.move(member.rollout_id, RolloutState.FILTERED, reason=FilterReason.BATCH_DROPPED)
        self._state.count("batches_dropped")
        self._state.count(f"filtered_{FilterReason.BATCH_DROPPED}", len(batch.members))
        self._note(Action.DROP_BATCH, batch.batch_id, None, f"{held}; {len(batch.members)} rollouts", now)
        return dropped

    def retry_lost(self, lost: Mapping[RolloutId, str], now: float) -> tuple[RolloutId, ...]:
        """Issue rollouts whose result is lost again; the values say why it is. What is trained stays trained. Returns
        those that get a new attempt."""
        known = {rollout_id: why for rollout_id, why in lost.items() if rollout_id in self._state.rollouts}
        for batch in (*self._state.leases(), *self._state.queue()):
            if any(member.rollout_id in known for member in batch.members):
                self._dissolve(batch)
        again = []
        for rollout_id, why in sorted(known.items()):
            rollout = self._state.rollouts[rollout_id]
            if rollout.state in (RolloutState.WAITING, RolloutState.SEALED):
                self._note(Action.RETRY_LOST, rollout_id, rollout.attempt, f"{rollout.state}: {why}", now)
                self._issue_again(rollout_id, now)
                again.append(rollout_id)
            elif rollout.state is RolloutState.TRAINED:
                self._note(Action.RETRY_LOST, rollout_id, rollout.attempt, f"stays trained: {why}", now)
        if again:
            self._state.count("rollouts_retried", len(again))
        return tuple(again)

    def unpark(self, tasks: Sequence[str] | None, now: float) -> tuple[TaskId, ...]:
        """Release parked tasks, all of them when None. Raises TaskNotParked, with nothing changed."""
        parked = dict(self._state.parked)
        chosen = list(parked) if tasks is None else [TaskId(task) for task in dict.fromkeys(tasks)]
        if strangers := [task for task in chosen if task not in parked]:
            raise TaskNotParked(
                f"{strangers[0]} is not parked: `headrace tasks parked` lists those that are "
                f"({', '.join(sorted(parked)[:5]) or 'none'}{', ...' if len(parked) > 5 else ''})"
            )
        for task in chosen:
            self._note(Action.UNPARK, task, None, parked[task], now)
            self._history.release(task)
        return tuple(chosen)

    def _held(self) -> BatchRecord:
        held = self._state.leases()
        if len(held) != 1:
            raise LeaseError(
                f"the learner held {len(held)} batches when the run ended: name the one to drop ({self._droppable()})"
            )
        return held[0]

    def _droppable(self) -> str:
        batches = [batch.batch_id for batch in (*self._state.leases(), *self._state.queue())]
        return f"now: {', '.join(batches)}" if batches else "now: none"

    def _dissolve(self, batch: BatchRecord) -> None:
        """Its members are sealed rollouts like any."""
        self._state.put(replace(batch, state=BatchState.DISSOLVED, queue_order=None))
        self._state.count("batches_dissolved")
        for member in batch.members:
            self._state.move(member.rollout_id, RolloutState.SEALED, batch_id=None)

    def _issue_again(self, rollout_id: RolloutId, now: float) -> None:
        group = self._state.group_of(rollout_id)
        if group.state is GroupState.OPEN:
            self._unfinish(rollout_id, now)
            self._sealing.watch(group.group_id)
            return
        # The group was sealed with this result: its reward goes on counting.
        self._state.put(self._as_counted(rollout_id))
        self._state.move(rollout_id, RolloutState.PENDING, reward=None, advantage=None)

    def _unfinish(self, rollout_id: RolloutId, now: float) -> None:
        """A member of an open group: its reward counts nowhere yet but in the task's history."""
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
            )
        )
        self._state.move(rollout_id, RolloutState.PENDING, reward=None, first_reward=None)

    def _as_counted(self, rollout_id: RolloutId) -> AttemptRecord:
        """The attempt as the buffer counted it. Where a result was acknowledged and never reached the disk, the
        rollout's own row is all that is left of it."""
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

    def _note(self, action: Action, subject: str, attempt: int | None, detail: str, now: float) -> None:
        sequence = max(self._state.interventions, default=0) + 1
        self._state.put(
            InterventionRecord(
                sequence=sequence, action=action, subject=subject, attempt=attempt, detail=detail, at_s=now
            )
        )
