"""What becomes of a rollout over the staleness bound.

Invariants:
- It is issued again, at the front, until it went over the bound `max_evictions` times (fixed when its group was
  opened); once more and it is evicted for good. Slow tasks are neither dropped at once nor tried for ever.
- One that is over because its line was left at a fork, not because it is slow, does not count as such.
- What its group's sealing fixed stays: baseline, scale, and its first reward in the group's statistics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.buffer.core.records import RolloutState

if TYPE_CHECKING:
    from headrace.buffer.core.state import ReplayState
    from headrace.buffer.core.task_history import TaskHistory
    from headrace.buffer.types import RolloutId
    from headrace.buffer.versions import PolicyVersion


def evict(state: ReplayState, history: TaskHistory, rollout_id: RolloutId, version: PolicyVersion) -> None:
    """Issue a rollout over the bound at `version` again, or end it."""
    rollout, group = state.rollouts[rollout_id], state.group_of(rollout_id)
    forked = not state.foresight.tree.leads_to(state.attempts[rollout_id].version, version)
    if not forked:
        history.evicted(group.task_id)
        if rollout.evictions >= group.max_evictions:
            state.move(rollout_id, RolloutState.EVICTED, batch_id=None)
            state.count("rollouts_evicted")
            return
    evictions = rollout.evictions + (not forked)
    state.move(rollout_id, RolloutState.PENDING, batch_id=None, evictions=evictions, reward=None, advantage=None)
    state.count("rollouts_reissued")
