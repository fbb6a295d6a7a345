"""What becomes of a rollout over the staleness bound.

Invariants:
- It is issued again, at the front, until it went over the bound `max_evictions` times (fixed when its group was
  opened); once more and it is evicted for good. Slow tasks are neither dropped at once nor tried for ever.
- An attempt of an earlier epoch went over by the fork, not because it is slow: that does not count.
- What its group's sealing fixed stays: baseline, scale, and its first reward in the group's statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer.records import RolloutState

if TYPE_CHECKING:
    from headrace.buffer.history import TaskHistory
    from headrace.buffer.state import ReplayState
    from headrace.buffer.types import RolloutId


def evict(state: ReplayState, history: TaskHistory, rollout_id: RolloutId) -> None:
    """Issue a rollout over the bound again, or end it."""
    rollout, group = state.rollouts[rollout_id], state.group_of(rollout_id)
    forked = state.attempts[rollout_id].version.epoch < state.epoch
    if not forked:
        history.evicted(group.task_id)
        if rollout.evictions >= group.max_evictions:
            state.move(rollout_id, RolloutState.EVICTED, batch_id=None)
            state.count("rollouts_evicted")
            return
    evictions = rollout.evictions + (not forked)
    state.move(rollout_id, RolloutState.PENDING, batch_id=None, evictions=evictions, reward=None, advantage=None)
    state.count("rollouts_reissued")
