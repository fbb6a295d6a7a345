"""The staleness bound, and what happens to a rollout that exceeds it.

Invariants:
- Admission, issue, take, cancellation and sealing all use `StalenessBound`. `headrace ledger verify` does not: it
  recomputes staleness from the stored evidence.
- A rollout over the bound is issued again, ahead of all others, until it has exceeded the bound `max_evictions` times
  (a number fixed when its group was opened); the next time it is evicted for good. Slow tasks are neither dropped at
  once nor retried forever.
- A rollout that is over the bound because a fork left its versions behind, not because it is slow, does not count as
  evicted.
- A rollout that is issued again keeps the values that were fixed when its group was sealed: its baseline, its scale,
  and its first reward in the group's statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.buffer.core.records import RolloutState
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.trajectories.types import RolloutId
from headrace.buffer.trajectories.versions import PolicyVersion, VersionTree


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """The largest staleness, in optimizer updates, at which a rollout may be trained.

    Trained at version v, a rollout whose tokens were sampled by versions S has the staleness
    `max(tree.staleness(v, s) for s in S)`: the number of optimizer updates on the longest path in the version tree
    between v and one of S. The rollout is within the bound while its staleness is at most `updates`.
    """

    updates: int

    def updates_left(self, tree: VersionTree, trained_at: PolicyVersion, sampled: Iterable[PolicyVersion]) -> int:
        """Return for how many updates after `trained_at` a rollout sampled by these versions stays within the bound;
        negative if it already exceeds the bound."""
        return self.updates - stalest(tree, trained_at, sampled)

    def admits(self, tree: VersionTree, trained_at: PolicyVersion, sampled: Iterable[PolicyVersion]) -> bool:
        """Return whether a rollout sampled by these versions may be trained at `trained_at`."""
        return self.updates_left(tree, trained_at, sampled) >= 0

    def stock(self, batch_size: int) -> int:
        """Return how many rollouts may be in stock so that the last one can be trained within the bound: one batch at
        the current version, and one at each of the next `updates` versions."""
        return (self.updates + 1) * batch_size


def stalest(tree: VersionTree, trained_at: PolicyVersion, sampled: Iterable[PolicyVersion]) -> int:
    """Return the highest staleness at `trained_at` among tokens sampled by these versions. `sampled` must not be
    empty."""
    return max(tree.staleness(trained_at, version) for version in sampled)


def evict(state: ReplayState, history: TaskHistory, rollout_id: RolloutId, version: PolicyVersion) -> None:
    """Reissue a rollout that is over the bound at `version`, or end it if it has no reissues left."""
    rollout, group, attempt = state.rollouts[rollout_id], state.group_of(rollout_id), state.attempts[rollout_id]
    forked = not state.path.prediction.tree.leads_to(attempt.version, version)
    reason = "from undone steps" if forked else f"over the staleness bound at version {version}"
    state.put(replace(attempt, detail=f"{attempt.detail}; evicted: {reason}".removeprefix("; ")))
    if not forked:
        history.evicted(group.task_id)
        if rollout.evictions >= group.max_evictions:
            state.move(rollout_id, RolloutState.EVICTED, batch_id=None)
            state.count("rollouts_evicted")
            return
    evictions = rollout.evictions + (not forked)
    state.move(
        rollout_id,
        RolloutState.PENDING,
        batch_id=None,
        evictions=evictions,
        reward=None,
        advantage=None,
        turn_advantages=None,
    )
    state.count("rollouts_reissued")
