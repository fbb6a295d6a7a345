"""The in-memory state of the replay core: ledger records by key, with indices over them.

Invariants:
- Records change only through `put`, which updates every index and remembers the newest record for the shell, so that no
  index can drift.
- `drain` returns each changed record once; writing these records over the rows of the ledger makes the ledger equal to
  this state.
- Only `close_covered` scans all rollouts: even with ten thousand rollouts in flight, the cost of a call is proportional
  to what it changes.
- Closed groups are forgotten, except for their counts: all their members are final, and a recorded checkpoint covers
  those that were trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush
from typing import TypeVar

from headrace.buffer.core.advantages import RewardSpread
from headrace.buffer.core.records import (
    FINAL,
    OUTAGES_KEPT,
    AttemptRecord,
    BatchRecord,
    CheckpointRecord,
    CommitRecord,
    CounterRecord,
    EpochRecord,
    EvaluationRecord,
    GroupRecord,
    GroupState,
    InterventionRecord,
    OutageRecord,
    Record,
    RolloutRecord,
    RolloutState,
    Snapshot,
    TaskRecord,
)
from headrace.buffer.core.source_names import ended_counter, source_name
from headrace.buffer.core.training_path import TrainingPath
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.types import GroupId, RolloutId
from headrace.buffer.trajectories.versions import PolicyVersion

K = TypeVar("K")
_SPREAD_SUMS = ("grpo_square_sum", "grpo_deviation_sum")
Versions = tuple[PolicyVersion, ...]
"""Versions that sampled a trajectory's trained tokens; its staleness depends on nothing else."""


class ReplayState:
    """State of the core. Its fields may be read freely but changed only with `put`. Names with an underscore are
    indices. `sources` are the names of the run's sources of tasks; a run without sources has a single one, without a
    name."""

    def __init__(self, snapshot: Snapshot, sources: Sequence[str] = ()) -> None:
        self.sources = tuple(sources) or ("",)
        self.groups: dict[GroupId, GroupRecord] = {}
        self.members: dict[GroupId, dict[int, RolloutId]] = {}
        self.rollouts: dict[RolloutId, RolloutRecord] = {}
        self.by_state: dict[RolloutState, dict[RolloutId, None]] = {state: {} for state in RolloutState}
        self.attempts: dict[RolloutId, AttemptRecord] = {}
        self.path = TrainingPath(snapshot)
        self.evaluations = set(snapshot.evaluations)
        self.tasks: dict[TaskId, TaskRecord] = {}
        self.counters: Counter[str] = Counter()
        self.interventions: dict[int, InterventionRecord] = {}
        self.closed = Counter(snapshot.closed)
        self.next_ordinal, self.next_seal = snapshot.next_ordinal, snapshot.next_seal
        self.evaluations_closed = snapshot.evaluations_closed
        self.parked: dict[TaskId, str] = {}
        self.outages: dict[int, OutageRecord] = {}
        """Number of members of complete groups, by source."""
        self.spread_sums = {source: {name: Fraction() for name in _SPREAD_SUMS} for source in self.sources}
        self.in_flight_by_version: dict[PolicyVersion, dict[RolloutId, None]] = {}
        """Rollouts in flight by the version their attempt was issued at."""
        self.free_by_versions: dict[Versions, dict[RolloutId, None]] = {}
        """Sealed rollouts that are in no batch, by the versions that sampled them."""
        self.stock: dict[str, Counter[RolloutState]] = {name: Counter() for name in self.sources}
        """Number of rollouts by source and state, without closed groups."""
        self.free: Counter[str] = Counter()
        """Number of sealed rollouts that are in no batch, by source."""
        self.changes_made = 0
        self._changes: dict[tuple[type, object], Record] = {}
        self._open: dict[GroupId, None] = {}
        self._pending: list[tuple[bool, int, int, RolloutId]] = []
        # Attempts after the rollouts in a snapshot: the indices by version need both.
        for record in sorted(snapshot.records, key=lambda record: isinstance(record, RolloutRecord)):
            self._index(record)

    def put(self, record: Record) -> None:
        """Insert or replace a record."""
        if isinstance(record, RolloutRecord):
            self._count_end(record)
        self._index(record)
        self._changes[type(record), record.key] = record
        self.changes_made += 1

    def drain(self) -> tuple[Record, ...]:
        """Return the records that changed since the last call, each in its newest form."""
        changes = tuple(self._changes.values())
        self._changes.clear()
        return changes

    def count(self, name: str, by: int = 1) -> None:
        """Add to a durable counter."""
        self.put(CounterRecord(name=name, value=self.counters[name] + by))

    def move(self, rollout_id: RolloutId, state: RolloutState, **changes: object) -> RolloutRecord:
        """Put a rollout into a state, with other fields of its record replaced."""
        moved = replace(self.rollouts[rollout_id], state=state, **changes)  # type: ignore[arg-type]
        self.put(moved)
        return moved

    def task(self, task_id: TaskId) -> TaskRecord:
        """Return the record of a task, or an empty record if nothing is known about the task."""
        return self.tasks.get(task_id) or TaskRecord(task_id=task_id)

    def reward_spread(self, source: str) -> RewardSpread:
        """Return the spread of rewards in the complete groups of a source's tasks."""
        sums = self.spread_sums[source]
        return RewardSpread(**{name: float(value) for name, value in sums.items()})

    def source_of(self, rollout: RolloutRecord) -> str:
        """Return the name of a rollout's source; empty in a run without sources."""
        return self.source_of_task(self.groups[rollout.group_id].task_id)

    def source_of_task(self, task_id: TaskId) -> str:
        """Return the name of a task's source; empty in a run without sources."""
        return source_name(task_id) if self.sources[0] else ""

    def ended(self, source: str, state: RolloutState) -> int:
        """Return the number of a source's rollouts that ended in a final state, including those of closed groups;
        0 in a run without sources, which has no such counters."""
        return self.counters[ended_counter(source, state)]

    def given(self) -> dict[str, int]:
        """Return the number of rollouts that each source has given to batches: trained, leased, or in a batch that is
        to be issued again."""
        return {
            name: self.ended(name, RolloutState.TRAINED)
            + stock[RolloutState.LEASED]
            + stock[RolloutState.SEALED]
            - self.free[name]
            for name, stock in self.stock.items()
        }

    def group_of(self, rollout_id: RolloutId) -> GroupRecord:
        """Return the group of a rollout."""
        return self.groups[self.rollouts[rollout_id].group_id]

    def rollouts_of(self, group_id: GroupId) -> tuple[RolloutRecord, ...]:
        """Return the members of a group, by member number."""
        members = self.members[group_id]
        return tuple(self.rollouts[members[number]] for number in sorted(members))

    def open_groups(self) -> tuple[GroupId, ...]:
        """Return the groups that are not sealed yet, oldest first."""
        return tuple(self._open)

    def next_pending(self) -> RolloutRecord | None:
        """Return the rollout to issue next: those issued again come first, then those of the oldest groups."""
        while self._pending:
            known = self.rollouts.get(self._pending[0][-1])
            if known is not None and known.state is RolloutState.PENDING:
                return known
            heappop(self._pending)
        return None

    def next_pending_but(self, spared: Collection[TaskId], held: Collection[str] = ()) -> RolloutRecord | None:
        """Return the next pending rollout of a task that is not in `spared`, and of a source that is not in `held`.
        Scans all pending rollouts."""
        pending = (self.rollouts[rollout_id] for rollout_id in self.by_state[RolloutState.PENDING])
        others = (
            rollout
            for rollout in pending
            if self.groups[rollout.group_id].task_id not in spared and self.source_of(rollout) not in held
        )
        return min(others, key=self._priority, default=None)

    def _priority(self, rollout: RolloutRecord) -> tuple[bool, int, int]:
        """Return the sort key of a pending rollout; the lowest is issued first."""
        return rollout.evictions == 0, self.groups[rollout.group_id].ordinal, rollout.member

    def versions_of(self, rollout_id: RolloutId) -> Versions:
        """Return the versions that sampled a rollout's trained tokens."""
        return tuple(part.version for part in self.attempts[rollout_id].trained)

    def age(self, rollout_id: RolloutId) -> tuple[int, int]:
        """Return the key that sorts sealed rollouts, oldest first: (seal order of the group, member)."""
        rollout = self.rollouts[rollout_id]
        return (self.groups[rollout.group_id].seal_order or 0, rollout.member)

    def close_covered(self, sequence: int) -> None:
        """Close and forget the groups and batches that cannot change any more, now that a checkpoint covers the steps
        up to `sequence`."""
        covered = {commit.batch_id for commit in self.path.commits.values() if commit.sequence <= sequence}
        final = [
            group_id
            for group_id in self.groups
            if all(
                # A batch that was forgotten was covered before.
                rollout.batch_id in covered or rollout.batch_id not in self.path.batches
                if rollout.state is RolloutState.TRAINED
                else rollout.state in FINAL
                for rollout in self.rollouts_of(group_id)
            )
        ]
        for group_id in final:
            self.put(replace(self.groups[group_id], closed=True))
            for rollout_id in self.members.pop(group_id).values():
                rollout = self.rollouts.pop(rollout_id)
                del self.by_state[rollout.state][rollout_id]
                self.stock[self.source_of(rollout)][rollout.state] -= 1
                self.closed[rollout.state] += 1
                self.attempts.pop(rollout_id, None)
            del self.groups[group_id]
        for batch in self.path.ended_batches(covered):
            self.put(replace(batch, closed=True))
            self.path.forget_batch(batch)

    def forget_evaluations(self, keys: Collection[tuple[RolloutId, int]]) -> None:
        """Remove the evaluation results that the ledger has moved to its archive; only their number is kept."""
        self.evaluations.difference_update(keys)
        self.evaluations_closed += len(keys)

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
                if record.state is GroupState.OPEN:
                    self._open[record.group_id] = None
                else:
                    self._open.pop(record.group_id, None)
            case BatchRecord() | CommitRecord() | EpochRecord() | CheckpointRecord():
                self.path.index(record)
            case EvaluationRecord():
                self.evaluations.add(record.key)
            case TaskRecord():
                self._index_task(record)
            case OutageRecord():
                self.outages[record.number] = record
                while len(self.outages) > OUTAGES_KEPT:
                    del self.outages[next(iter(self.outages))]
            case CounterRecord():
                self.counters[record.name] = record.value
            case InterventionRecord():
                self.interventions[record.sequence] = record

    def _count_end(self, record: RolloutRecord) -> None:
        """Count a rollout of a source that ends, or no longer has ended because its step was undone. These counters
        are all that is left of closed groups."""
        source, known = self.source_of(record), self.rollouts.get(record.rollout_id)
        before = known.state if known is not None else None
        if not source or before is record.state:
            return
        if before in FINAL:
            self.count(ended_counter(source, before), -1)
        if record.state in FINAL:
            self.count(ended_counter(source, record.state))

    def _index_rollout(self, record: RolloutRecord) -> None:
        known, source = self.rollouts.get(record.rollout_id), self.source_of(record)
        self.stock[source][record.state] += 1
        if known is not None:
            self.stock[source][known.state] -= 1
            del self.by_state[known.state][record.rollout_id]
            # These look the versions up in the attempt, so the next attempt's record must be put later.
            if known.state is RolloutState.IN_FLIGHT:
                _discard(self.in_flight_by_version, self.attempts[known.rollout_id].version, known.rollout_id)
            elif known.state is RolloutState.SEALED and known.batch_id is None:
                _discard(self.free_by_versions, self.versions_of(known.rollout_id), known.rollout_id)
                self.free[source] -= 1
        self.rollouts[record.rollout_id] = record
        self.by_state[record.state][record.rollout_id] = None
        self.members.setdefault(record.group_id, {})[record.member] = record.rollout_id
        if record.state is RolloutState.PENDING and (known is None or known.state is not RolloutState.PENDING):
            heappush(self._pending, (*self._priority(record), record.rollout_id))
        elif record.state is RolloutState.IN_FLIGHT:
            version = self.attempts[record.rollout_id].version
            self.in_flight_by_version.setdefault(version, {})[record.rollout_id] = None
        elif record.state is RolloutState.SEALED and record.batch_id is None:
            self.free_by_versions.setdefault(self.versions_of(record.rollout_id), {})[record.rollout_id] = None
            self.free[source] += 1

    def _index_task(self, record: TaskRecord) -> None:
        # Exact sums: a core folded from the rows must come to the same scale, whatever the order of the rows.
        known, source = self.task(record.task_id), self.source_of_task(record.task_id)
        for name in _SPREAD_SUMS:
            before, after = getattr(known, name), getattr(record, name)
            if after != before:
                self.spread_sums[source][name] += Fraction(after) - Fraction(before)
        self.tasks[record.task_id] = record
        if record.parked:
            self.parked[record.task_id] = record.last_failure
        else:
            self.parked.pop(record.task_id, None)


def _discard(index: dict[K, dict[RolloutId, None]], key: K, rollout_id: RolloutId) -> None:
    del index[key][rollout_id]
    if not index[key]:
        del index[key]
