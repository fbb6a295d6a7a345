"""What the core knows: records by key, with the indices that follow from them.

Invariants:
- Records change only through `put`, which keeps every index and remembers the newest record for the shell: no index
  can drift.
- `drain` returns each changed record once; written over the rows of the ledger they make it equal to this state.
- No call scans all rollouts but `close_covered`: with ten thousand in flight a call costs what it changes.
- Closed groups are forgotten: all members are final and a recorded checkpoint covers what was trained. Only their
  numbers stay.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from heapq import heappop, heappush
from typing import TYPE_CHECKING, TypeVar

from headrace.buffer.core.records import (
    FINAL,
    OUTAGES_KEPT,
    AttemptRecord,
    BatchRecord,
    BatchState,
    CheckpointRecord,
    CommitRecord,
    CounterRecord,
    EpochRecord,
    EvaluationRecord,
    GroupRecord,
    GroupState,
    InterventionRecord,
    OutageRecord,
    RolloutRecord,
    RolloutState,
    TaskRecord,
)
from headrace.buffer.core.repeated_steps import Foresight, UndoneSteps
from headrace.buffer.versions import PolicyVersion, VersionTree

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from headrace.buffer.core.records import Record, Snapshot
    from headrace.buffer.tasks import TaskId
    from headrace.buffer.types import BatchId, GroupId, RolloutId

K = TypeVar("K")
Versions = tuple[PolicyVersion, ...]
"""Which versions sampled a trajectory's trained tokens: what its staleness depends on."""


class ReplayState:
    """Read its fields freely; change them with `put` only. Names with an underscore are indices."""

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
        self.tasks: dict[TaskId, TaskRecord] = {}
        self.counters: Counter[str] = Counter()
        self.interventions: dict[int, InterventionRecord] = {}
        self.tree = VersionTree()
        self.closed = Counter(snapshot.closed)
        self.next_ordinal, self.next_seal = snapshot.next_ordinal, snapshot.next_seal
        self.next_batch, self.next_commit = snapshot.next_batch, snapshot.next_commit
        self.steps_closed, self.evaluations_closed = snapshot.steps_closed, snapshot.evaluations_closed
        self.steps_skipped = snapshot.steps_closed_skipped
        self.parked: dict[TaskId, str] = {}
        self.outages: dict[int, OutageRecord] = {}
        self.complete_members, self.deviation_square_sum = 0, Fraction()
        self.changes_made = 0
        self._changes: dict[tuple[type, object], Record] = {}
        self._open: dict[GroupId, None] = {}
        self._pending: list[tuple[bool, int, int, RolloutId]] = []
        self._in_flight: dict[PolicyVersion, dict[RolloutId, None]] = {}
        self._free: dict[Versions, dict[RolloutId, None]] = {}
        self._batches: dict[BatchState, dict[BatchId, None]] = {state: {} for state in BatchState}
        self._undone = UndoneSteps()
        self._foresight: Foresight | None = None
        # Attempts after the rollouts in a snapshot: the indices by version need both.
        for record in sorted(snapshot.records, key=lambda record: isinstance(record, RolloutRecord)):
            self._index(record)

    def put(self, record: Record) -> None:
        """Insert or replace a record."""
        self._index(record)
        self._changes[type(record), record.key] = record
        self.changes_made += 1

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

    def task(self, task_id: TaskId) -> TaskRecord:
        """What is known of a task, possibly nothing."""
        return self.tasks.get(task_id) or TaskRecord(task_id=task_id)

    def group_of(self, rollout_id: RolloutId) -> GroupRecord:
        """The group of a rollout."""
        return self.groups[self.rollouts[rollout_id].group_id]

    def rollouts_of(self, group_id: GroupId) -> tuple[RolloutRecord, ...]:
        """The members of a group, by member number."""
        members = self.members[group_id]
        return tuple(self.rollouts[members[number]] for number in sorted(members))

    def open_groups(self) -> tuple[GroupId, ...]:
        """Groups that are not sealed yet, oldest first."""
        return tuple(self._open)

    def next_pending(self) -> RolloutRecord | None:
        """The rollout whose attempt is next: those issued again first, then those of the oldest groups."""
        while self._pending:
            known = self.rollouts.get(self._pending[0][-1])
            if known is not None and known.state is RolloutState.PENDING:
                return known
            heappop(self._pending)
        return None

    def next_pending_but(self, spared: Collection[TaskId]) -> RolloutRecord | None:
        """As `next_pending`, of another task than these. Looks at all that are pending."""
        pending = (self.rollouts[rollout_id] for rollout_id in self.by_state[RolloutState.PENDING])
        others = (rollout for rollout in pending if self.groups[rollout.group_id].task_id not in spared)
        return min(others, key=self._place, default=None)

    def _place(self, rollout: RolloutRecord) -> tuple[bool, int, int]:
        """Among those that are pending: the lowest goes first."""
        return rollout.evictions == 0, self.groups[rollout.group_id].ordinal, rollout.member

    @property
    def in_flight_by_version(self) -> Mapping[PolicyVersion, Mapping[RolloutId, None]]:
        """Rollouts in flight by the version their attempt was issued at."""
        return self._in_flight

    @property
    def free_by_versions(self) -> Mapping[Versions, Mapping[RolloutId, None]]:
        """Sealed rollouts that no batch holds, by the versions that sampled them."""
        return self._free

    def free_count(self) -> int:
        """How many sealed rollouts no batch holds."""
        return sum(map(len, self._free.values()))

    def versions_of(self, rollout_id: RolloutId) -> Versions:
        """The versions of a rollout's trained tokens."""
        return tuple(part.version for part in self.attempts[rollout_id].trained)

    def age(self, rollout_id: RolloutId) -> tuple[int, int]:
        """Order of sealed rollouts, oldest first: (seal order of the group, member)."""
        rollout = self.rollouts[rollout_id]
        return (self.groups[rollout.group_id].seal_order or 0, rollout.member)

    def queue(self) -> list[BatchRecord]:
        """Batches to be issued again, in order."""
        queued = (self.batches[batch_id] for batch_id in self._batches[BatchState.QUEUED])
        return sorted(queued, key=lambda batch: batch.queue_order or 0)

    def leases(self) -> list[BatchRecord]:
        """Batches held by a learner, in the order they were taken."""
        leased = (self.batches[batch_id] for batch_id in self._batches[BatchState.LEASED])
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

    @property
    def next_version(self) -> PolicyVersion | None:
        """The version at which the next fresh batch will be trained: the head, and a step for each batch that is leased
        or waits to be issued again."""
        return self.foresight.version if self.epochs else None

    @property
    def foresight(self) -> Foresight:
        """What the leased batches and those to be issued again come to, of an open epoch."""
        if self._foresight is None:
            assert self.head is not None
            batches = [*self.leases(), *self.queue()]
            self._foresight = self._undone.foresee(self.tree, self.head, self.chain, batches)
        return self._foresight

    def horizon(self, version: PolicyVersion) -> PolicyVersion:
        """The first version at which what no batch holds can be trained: `version`, or after a resume the one that the
        batches issued again lead to."""
        if not self.epochs or not (self._batches[BatchState.QUEUED] or self._is_repeating()):
            return version
        return self.foresight.version

    def staleness(self, trained_at: PolicyVersion, sampled: PolicyVersion) -> int:
        """Updates on the path between the two, once the batches that are leased or to be issued again are trained."""
        return (self.foresight.tree if self.epochs else self.tree).staleness(trained_at, sampled)

    def lies_ahead(self, version: PolicyVersion) -> bool:
        """Whether the batches issued again lead to these weights, and are not there yet."""
        head = self.head
        if head is None or version.epoch not in self.tree.forks or version.step <= head.step:
            return False
        return self.foresight.tree.leads_to(version, self.foresight.version)

    def repeated(self, trained_at: PolicyVersion, chain: str) -> PolicyVersion | None:
        """The version of an undone step that a step from `trained_at` to `chain` repeats."""
        return self._undone.repeated(self.tree, trained_at, chain)

    def _is_repeating(self) -> bool:
        head, fork = self.head, self.foresight.tree.forks[self.epoch]
        return head is not None and fork is not None and fork.step > head.step

    def close_covered(self, sequence: int) -> None:
        """Close and forget what the steps up to `sequence`, now in a checkpoint, leave nothing to do for."""
        covered = {commit.batch_id for commit in self.commits.values() if commit.sequence <= sequence}
        for group_id in [group_id for group_id in self.groups if self._is_final(group_id, covered)]:
            self.put(replace(self.groups[group_id], closed=True))
            self._forget(group_id)
        for state in (BatchState.COMMITTED, BatchState.DISSOLVED, BatchState.DROPPED):
            for batch_id in tuple(self._batches[state]):
                if state is not BatchState.COMMITTED or batch_id in covered:
                    self.put(replace(self.batches[batch_id], closed=True))
                    del self.batches[batch_id], self._batches[state][batch_id]

    def forget_steps(self, before: int, checkpoints: Collection[PolicyVersion]) -> None:
        """Steps and checkpoints that the ledger moved to its archive; of the steps only their number stays."""
        for sequence in [sequence for sequence in self.commits if sequence < before]:
            del self.commits[sequence]
            self.steps_closed += 1
        for version in checkpoints:
            self.checkpoints.pop(version, None)

    def forget_evaluations(self, keys: Collection[tuple[RolloutId, int]]) -> None:
        """Answers that the ledger moved to its archive; only their number stays."""
        self.evaluations.difference_update(keys)
        self.evaluations_closed += len(keys)

    def _is_final(self, group_id: GroupId, covered: set[BatchId]) -> bool:
        return all(
            # A batch that was forgotten was covered before.
            rollout.batch_id in covered or rollout.batch_id not in self.batches
            if rollout.state is RolloutState.TRAINED
            else rollout.state in FINAL
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
                self._index_group(record)
            case BatchRecord():
                self._index_batch(record)
            case CommitRecord():
                self._index_commit(record)
            case EpochRecord():
                self.epochs[record.epoch] = record
                self.tree.forks[record.epoch] = record.follows
                self._foresight = None
            case CheckpointRecord():
                self.checkpoints[record.version] = record
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

    def _index_group(self, record: GroupRecord) -> None:
        self.groups[record.group_id] = record
        self.members.setdefault(record.group_id, {})
        self.next_ordinal = max(self.next_ordinal, record.ordinal + 1)
        self.next_seal = max(self.next_seal, (record.seal_order or 0) + 1)
        if record.state is GroupState.OPEN:
            self._open[record.group_id] = None
        else:
            self._open.pop(record.group_id, None)

    def _index_rollout(self, record: RolloutRecord) -> None:
        known = self.rollouts.get(record.rollout_id)
        if known is not None:
            del self.by_state[known.state][record.rollout_id]
            self._unindex_by_version(known)
        self.rollouts[record.rollout_id] = record
        self.by_state[record.state][record.rollout_id] = None
        self.members.setdefault(record.group_id, {})[record.member] = record.rollout_id
        if record.state is RolloutState.PENDING and (known is None or known.state is not RolloutState.PENDING):
            heappush(self._pending, (*self._place(record), record.rollout_id))
        elif record.state is RolloutState.IN_FLIGHT:
            version = self.attempts[record.rollout_id].version
            self._in_flight.setdefault(version, {})[record.rollout_id] = None
        elif record.state is RolloutState.SEALED and record.batch_id is None:
            self._free.setdefault(self.versions_of(record.rollout_id), {})[record.rollout_id] = None

    def _unindex_by_version(self, known: RolloutRecord) -> None:
        """Must come before the next attempt's record is put."""
        if known.state is RolloutState.IN_FLIGHT:
            _discard(self._in_flight, self.attempts[known.rollout_id].version, known.rollout_id)
        elif known.state is RolloutState.SEALED and known.batch_id is None:
            _discard(self._free, self.versions_of(known.rollout_id), known.rollout_id)

    def _index_batch(self, record: BatchRecord) -> None:
        self._foresight = None
        known = self.batches.get(record.batch_id)
        if known is not None:
            del self._batches[known.state][record.batch_id]
        self.batches[record.batch_id] = record
        self._batches[record.state][record.batch_id] = None
        self.next_batch = max(self.next_batch, record.ordinal + 1)

    def _index_commit(self, record: CommitRecord) -> None:
        self._foresight = None
        if record.rolled_back_by is not None:
            self._undone.add(record)
        self.next_commit = max(self.next_commit, record.sequence + 1)
        if record.rolled_back_by is None:
            self.commits[record.sequence] = record
            self.steps_skipped += record.skipped
        elif self.commits.pop(record.sequence, None) is not None:
            self.steps_skipped -= record.skipped

    def _index_task(self, record: TaskRecord) -> None:
        # Exact sums: a core folded from the rows must come to the same scale, whatever the order of the rows.
        known = self.task(record.task_id)
        self.complete_members += record.complete_members - known.complete_members
        if record.deviation_square_sum != known.deviation_square_sum:
            self.deviation_square_sum += Fraction(record.deviation_square_sum) - Fraction(known.deviation_square_sum)
        self.tasks[record.task_id] = record
        if record.parked:
            self.parked[record.task_id] = record.last_failure
        else:
            self.parked.pop(record.task_id, None)


def _discard(index: dict[K, dict[RolloutId, None]], key: K, rollout_id: RolloutId) -> None:
    del index[key][rollout_id]
    if not index[key]:
        del index[key]
