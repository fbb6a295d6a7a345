"""The queue of batches to be issued again, with the number of times each has been tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.records import AttemptRecord, BatchRecord, BatchState, RolloutState
from headrace.buffer.core.staleness import evict
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.errors import BatchUntrainable
from headrace.buffer.trajectories.types import RolloutId
from headrace.buffer.trajectories.versions import PolicyVersion


class BatchQueue:
    """Batches to be issued again as they were, with the number of times each has been tried."""

    def __init__(self, state: ReplayState, config: BufferConfig, history: TaskHistory) -> None:
        self._state, self._config, self._history = state, config, history
        self._bound = config.bound

    def requeue(self, batches: Sequence[BatchRecord]) -> None:
        """Put batches at the front of the queue, in this order; some of them may already be in the queue."""
        named = {batch.batch_id for batch in batches}
        order = [*batches, *(batch for batch in self._state.path.queue() if batch.batch_id not in named)]
        for place, batch in enumerate(order):
            self._state.put(replace(batch, state=BatchState.QUEUED, queue_order=place, closed=False))
            for member in batch.members:
                self._state.move(member.rollout_id, RolloutState.SEALED, batch_id=batch.batch_id)
                group = self._state.group_of(member.rollout_id)
                if group.closed:
                    self._state.put(replace(group, closed=False))

    def left_behind(self) -> list[BatchRecord]:
        """Return the batches that a learner left behind: the leased ones, then the queued ones, keeping only the tries
        that count."""
        # Only the oldest lease was being trained. Where learners die one after the other in different steps, the
        # batches are not the reason.
        leases, queue = self._state.path.leases(), self._state.path.queue()
        unbegun = [replace(batch, tries=max(0, batch.tries - 1)) for batch in leases[1:]]
        if leases and leases[0].tries:
            queue = [batch if batch.failure else replace(batch, tries=0) for batch in queue]
        return [*leases[:1], *unbegun, *queue]

    def dissolve(self, batch: BatchRecord) -> None:
        """Make the members of a batch free sealed rollouts."""
        self._state.put(replace(batch, state=BatchState.DISSOLVED, queue_order=None))
        self._state.count("batches_dissolved")
        for member in batch.members:
            self._state.move(member.rollout_id, RolloutState.SEALED, batch_id=None)

    def settle(self, version: PolicyVersion) -> None:
        """Dissolve the batches at the front of the queue that can no longer be trained as they were at `version`."""
        tree = self._state.path.expected_tree
        for batch in self._state.path.queue():
            over = [
                member.rollout_id
                for member in batch.members
                if not self._bound.admits(tree, version, self._state.versions_of(member.rollout_id))
            ]
            if not over:
                return
            self.dissolve(batch)
            tree = self._state.path.expected_tree
            for rollout_id in over:
                evict(self._state, self._history, rollout_id, version)

    def refuse_untrainable(self) -> None:
        """Raise BatchUntrainable when the next batch has already been tried as often as allowed."""
        batch = next(iter(self._state.path.queue()), None)
        if batch is not None and batch.tries >= self._config.batch_tries:
            raise BatchUntrainable(untrainable(batch, self._state.attempts))


def untrainable(batch: BatchRecord, attempts: Mapping[RolloutId, AttemptRecord]) -> str:
    """Return why a batch cannot be trained, in one line with the fix."""
    reason = batch.failure
    if not reason:
        sizes = {
            member.rollout_id: sum(part.tokens for part in attempts[member.rollout_id].trained)
            for member in batch.members
            if member.rollout_id in attempts
        }
        largest = max(sizes, key=lambda rollout_id: sizes[rollout_id], default=None)
        reason = "the learner's process died in the step (out of memory, or killed after training.stage_timeout_s)"
        if largest is not None:
            reason += f" (its largest rollout is {largest} with {sizes[largest]} trained tokens)"
    return (
        f"batch {batch.batch_id} was tried {batch.tries} times without success: {reason}. Leave it out with `headrace "
        f"ledger repair RUN --drop-batch {batch.batch_id}`, or remove the cause and continue with `headrace resume RUN "
        "--retry-batch`"
    )
