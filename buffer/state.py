"""What the core knows: records by key, with the indices that follow from them.

Invariants:
- Records change only through `put`, which keeps every index and remembers the newest record for the shell: no index
  can drift.
- `drain` returns each changed record once; written over the rows of the ledger they make it equal to this state.
- Closed groups are forgotten: all members are final and a recorded checkpoint covers what was trained. Only their
  numbers stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace.buffer.records import (
    FINAL,
    AttemptRecord,
    BatchRecord,
    BatchState,
    CheckpointRecord,
    CommitRecord,
    CounterRecord,
    EpochRecord,
    EvaluationRecord,
    GroupRecord,
    RolloutRecord,
    RolloutState,
)
from headrace.buffer.versions import PolicyVersion, VersionTree

if TYPE_CHECKING:
    from headrace.buffer.records import Record, Snapshot
    from headrace.buffer.types import BatchId, GroupId, RolloutId


class ReplayState:
    """Read its fields freely; change them with `put` only."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.groups: dict[GroupId, GroupRecord] = {}
        self.members: dict[GroupId, dict[int, RolloutId]] = {}
        self.rollouts: dict[RolloutId, RolloutRecord] = {}
        self.by_state: dict[RolloutState, dict[RolloutId, None]] = {state: {} for state in RolloutState}
        self.attempts: dict[RolloutId, AttemptRecord] = {}
        self.batches: dict[BatchId, BatchRecord] = {}
        self.commits: dict[int, CommitRecord] = {}
        self.epochs: dict[int, EpochRecord] = {}
        self.checkpoints: dict[PolicyVersion, CheckpointRecord] = {}
        self.evaluations = set(snapshot.evaluations)
        self.counters: Counter[str] = Counter()
        self.tree = VersionTree()
        self.closed = Counter(snapshot.closed)
        self.next_ordinal, self.next_seal = snapshot.next_ordinal, snapshot.next_seal
        self.next_batch, self.next_commit = snapshot.next_batch, snapshot.next_commit
        self._changes: dict[tuple[type, object], Record] = {}
        for record in snapshot.records:
            self._index(record)

    def put(self, record: Record) -> None:
        """Insert or replace a record."""
        self._index(record)
        self._changes[type(record), record.key] = record

    def drain(self) -> tuple[Record, ...]:
        """The changed records since the last call, each in its newest form."""
        changes = tuple(self._changes.values())
        self._changes.clear()
        return changes

    def count(self, name: str, by: int = 1) -> None:
        """Add to a durable counter."""
        self.put(CounterRecord(name=name, value=self.counters[name] + by))

    def move(self, rollout_id: RolloutId, state: RolloutState, **changes: object) -> RolloutRecord:
        """Bring a rollout into a state, with other fields of its record replaced."""
        moved = replace(self.rollouts[rollout_id], state=state, **changes)  # type: ignore[arg-type]
        self.put(moved)
        return moved

    def rollouts_of(self, group_id: GroupId) -> tuple[RolloutRecord, ...]:
        """The members of a group, by member number."""
        members = self.members[group_id]
        return tuple(self.rollouts[members[number]] for number in sorted(members))

    def age(self, rollout_id: RolloutId) -> tuple[int, int]:
        """Order of sealed rollouts, oldest first: (seal order of the group, member)."""
        rollout = self.rollouts[rollout_id]
        return (self.groups[rollout.group_id].seal_order or 0, rollout.member)

    def queue(self) -> list[BatchRecord]:
        """Batches to be issued again, in order."""
        queued = (batch for batch in self.batches.values() if batch.state is BatchState.QUEUED)
        return sorted(queued, key=lambda batch: batch.queue_order or 0)

    def leases(self) -> list[BatchRecord]:
        """Batches held by a learner, in the order they were taken."""
        leased = (batch for batch in self.batches.values() if batch.state is BatchState.LEASED)
        return sorted(leased, key=lambda batch: (batch.epoch, batch.version.step))

    @property
    def epoch(self) -> int:
        """The current learner incarnation; 0 before the first."""
        return max(self.epochs, default=0)

    @property
    def last_commit(self) -> CommitRecord | None:
        """The newest step on the surviving path."""
        return next(reversed(self.commits.values()), None)

    @property
    def chain(self) -> str:
        """Hash chain over the surviving steps."""
        return self.last_commit.chain if self.last_commit else ""

    @property
    def head(self) -> PolicyVersion | None:
        """The version that the next step starts from; None before the first epoch."""
        if not self.epochs:
            return None
        last, epoch = self.last_commit, self.epochs[self.epoch]
        if last is not None and last.epoch == epoch.epoch:
            return last.version
        return PolicyVersion(epoch.epoch, epoch.parent.step if epoch.parent else 0)

    def close_covered(self, sequence: int) -> None:
        """Close and forget what the steps up to `sequence`, now in a checkpoint, leave nothing to do for."""
        covered = {commit.batch_id for commit in self.commits.values() if commit.sequence <= sequence}
        for group_id in [group_id for group_id in self.groups if self._is_final(group_id, covered)]:
            self.put(replace(self.groups[group_id], closed=True))
            self._forget(group_id)
        done = (BatchState.COMMITTED, BatchState.DISSOLVED)
        for batch in [batch for batch in self.batches.values() if batch.state in done]:
            if batch.state is BatchState.DISSOLVED or batch.batch_id in covered:
                self.put(replace(batch, closed=True))
                del self.batches[batch.batch_id]

    def _is_final(self, group_id: GroupId, covered: set[BatchId]) -> bool:
        return all(
            rollout.batch_id in covered if rollout.state is RolloutState.TRAINED else rollout.state in FINAL
            for rollout in self.rollouts_of(group_id)
        )

    def _forget(self, group_id: GroupId) -> None:
        for rollout_id in self.members.pop(group_id).values():
            rollout = self.rollouts.pop(rollout_id)
            del self.by_state[rollout.state][rollout_id]
            self.closed[rollout.state] += 1
            self.attempts.pop(rollout_id, None)
        del self.groups[group_id]

    def _index(self, record: Record) -> None:
        match record:
            case RolloutRecord():
                self._index_rollout(record)
            case AttemptRecord():
                self.attempts[record.rollout_id] = record
            case GroupRecord():
                self.groups[record.group_id] = record
                self.members.setdefault(record.group_id, {})
                self.next_ordinal = max(self.next_ordinal, record.ordinal + 1)
                self.next_seal = max(self.next_seal, (record.seal_order or 0) + 1)
            case BatchRecord():
                self.batches[record.batch_id] = record
                self.next_batch = max(self.next_batch, record.ordinal + 1)
            case CommitRecord():
                self._index_commit(record)
            case EpochRecord():
                self.epochs[record.epoch] = record
                if record.epoch not in self.tree.forks:
                    self.tree.open_epoch(record.epoch, record.parent)
            case CheckpointRecord():
                self.checkpoints[record.version] = record
            case EvaluationRecord():
                self.evaluations.add(record.key)
            case CounterRecord():
                self.counters[record.name] = record.value

    def _index_rollout(self, record: RolloutRecord) -> None:
        known = self.rollouts.get(record.rollout_id)
        if known is not None:
            del self.by_state[known.state][record.rollout_id]
        self.rollouts[record.rollout_id] = record
        self.by_state[record.state][record.rollout_id] = None
        self.members.setdefault(record.group_id, {})[record.member] = record.rollout_id

    def _index_commit(self, record: CommitRecord) -> None:
        self.next_commit = max(self.next_commit, record.sequence + 1)
        if record.rolled_back_by is None:
            self.commits[record.sequence] = record
        else:
            self.commits.pop(record.sequence, None)
