"""Epochs, steps, checkpoints and batches of a run, with the version tree they form.

Invariants:
- `commits` holds the steps of the surviving path only; steps that a resume undid are remembered by their hash chain.
- A step repeats an undone one when it has the same hash chain after it, starts from the same place in the version tree,
  and neither was skipped: equal batches from equal weights, hence equal weights. Anything else is a fork.
- The steps that the leased and queued batches will repeat are predicted from the ids and members of these batches
  alone. The prediction decides which rollouts need not be discarded; whether a rollout is trained is decided by
  committed steps only.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from headrace.buffer.core.records import BatchRecord, BatchState, CheckpointRecord, CommitRecord, EpochRecord, Snapshot
from headrace.buffer.trajectories.types import BatchId, batch_digest, extend_chain
from headrace.buffer.trajectories.versions import PolicyVersion, VersionTree


@dataclass(frozen=True, slots=True)
class ExpectedPath:
    """Expected state of the path after all leased and queued batches have been trained: its last version, and the
    version tree, which includes the undone steps that this training repeats."""

    version: PolicyVersion
    tree: VersionTree


class TrainingPath:
    """State of the training path. Its fields may be read freely; only `ReplayState` changes them. Names with an
    underscore are indices."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.batches: dict[BatchId, BatchRecord] = {}
        self.commits: dict[int, CommitRecord] = {}
        self.epochs: dict[int, EpochRecord] = {}
        self.checkpoints: dict[PolicyVersion, CheckpointRecord] = {}
        self.tree = VersionTree()
        self.next_batch, self.next_commit = snapshot.next_batch, snapshot.next_commit
        self.steps_closed, self.steps_skipped = snapshot.steps_closed, snapshot.steps_closed_skipped
        self._by_state: dict[BatchState, dict[BatchId, None]] = {state: {} for state in BatchState}
        self._undone = UndoneSteps()
        self._prediction: ExpectedPath | None = None

    def index(self, record: BatchRecord | CommitRecord | EpochRecord | CheckpointRecord) -> None:
        """Insert or replace a record."""
        if isinstance(record, CheckpointRecord):
            self.checkpoints[record.version] = record
            return
        self._prediction = None
        match record:
            case BatchRecord():
                known = self.batches.get(record.batch_id)
                if known is not None:
                    del self._by_state[known.state][record.batch_id]
                self.batches[record.batch_id] = record
                self._by_state[record.state][record.batch_id] = None
                self.next_batch = max(self.next_batch, record.ordinal + 1)
            case EpochRecord():
                self.epochs[record.epoch] = record
                self.tree.forks[record.epoch] = record.follows
            case CommitRecord():
                self.next_commit = max(self.next_commit, record.sequence + 1)
                if record.rolled_back_by is None:
                    self.commits[record.sequence] = record
                    self.steps_skipped += record.skipped
                    return
                self._undone.add(record)
                if self.commits.pop(record.sequence, None) is not None:
                    self.steps_skipped -= record.skipped

    def queue(self) -> list[BatchRecord]:
        """Return the batches to be issued again, in order."""
        queued = (self.batches[batch_id] for batch_id in self._by_state[BatchState.QUEUED])
        return sorted(queued, key=lambda batch: batch.queue_order or 0)

    def leases(self) -> list[BatchRecord]:
        """Return the batches held by a learner, in the order they were taken."""
        leased = (self.batches[batch_id] for batch_id in self._by_state[BatchState.LEASED])
        return sorted(leased, key=lambda batch: (batch.epoch, batch.version.step))

    @property
    def epoch(self) -> int:
        """Number of the current learner incarnation; 0 before the first."""
        return max(self.epochs, default=0)

    @property
    def last_commit(self) -> CommitRecord | None:
        """Newest step on the surviving path."""
        return next(reversed(self.commits.values()), None)

    @property
    def chain(self) -> str:
        """Hash chain over the surviving steps."""
        return self.last_commit.chain if self.last_commit else ""

    @property
    def head(self) -> PolicyVersion | None:
        """Version that the next step starts from; None before the first epoch."""
        if not self.epochs:
            return None
        last, epoch = self.last_commit, self.epochs[self.epoch]
        if last is not None and last.epoch == epoch.epoch:
            return last.version
        return PolicyVersion(epoch.epoch, epoch.parent.step if epoch.parent else 0)

    @property
    def next_version(self) -> PolicyVersion | None:
        """Version at which the next fresh batch will be trained: the head, plus a step for each leased or queued
        batch."""
        return self.prediction.version if self.epochs else None

    @property
    def prediction(self) -> ExpectedPath:
        """Predicted result of training the leased and queued batches. An epoch must be open."""
        if self._prediction is None:
            assert self.head is not None
            batches = [*self.leases(), *self.queue()]
            self._prediction = self._undone.predict(self.tree, self.head, self.chain, batches)
        return self._prediction

    @property
    def expected_tree(self) -> VersionTree:
        """Version tree once the leased and queued batches are trained."""
        return self.prediction.tree if self.epochs else self.tree

    def horizon(self, version: PolicyVersion) -> PolicyVersion:
        """Return the first version at which a rollout that is in no batch can be trained: `version`, or, after a
        resume, the version that the queued batches lead to."""
        if not self.epochs:
            return version
        head, fork = self.head, self.prediction.tree.forks[self.epoch]
        is_repeating = head is not None and fork is not None and fork.step > head.step
        return self.prediction.version if self._by_state[BatchState.QUEUED] or is_repeating else version

    def lies_ahead(self, version: PolicyVersion) -> bool:
        """Return whether the queued batches lead to the weights of `version` and have not reached them yet."""
        head = self.head
        if head is None or version.epoch not in self.tree.forks or version.step <= head.step:
            return False
        return self.prediction.tree.leads_to(version, self.prediction.version)

    def repeated(self, trained_at: PolicyVersion, chain: str) -> PolicyVersion | None:
        """Return the version of the undone step that a step from `trained_at` to `chain` repeats."""
        return self._undone.repeated(self.tree, trained_at, chain)

    def ended_batches(self, covered: Collection[BatchId]) -> list[BatchRecord]:
        """Return the batches that can no longer change: dissolved, dropped, or committed and `covered` by a
        checkpoint."""
        return [
            self.batches[batch_id]
            for state in (BatchState.COMMITTED, BatchState.DISSOLVED, BatchState.DROPPED)
            for batch_id in self._by_state[state]
            if state is not BatchState.COMMITTED or batch_id in covered
        ]

    def forget_batch(self, batch: BatchRecord) -> None:
        """Remove a batch that has ended."""
        del self.batches[batch.batch_id], self._by_state[batch.state][batch.batch_id]

    def forget_steps(self, before: int, checkpoints: Collection[PolicyVersion]) -> None:
        """Remove the steps and checkpoints that the ledger has moved to its archive; only the number of steps is
        kept."""
        for sequence in [sequence for sequence in self.commits if sequence < before]:
            del self.commits[sequence]
            self.steps_closed += 1
        for version in checkpoints:
            self.checkpoints.pop(version, None)


class UndoneSteps:
    """Steps that resumes undid, by the hash chain after them."""

    def __init__(self) -> None:
        self._by_chain: dict[str, dict[int, CommitRecord]] = {}

    def add(self, commit: CommitRecord) -> None:
        """Add an undone step; idempotent."""
        self._by_chain.setdefault(commit.chain, {})[commit.sequence] = commit

    def matches(self, tree: VersionTree, trained_at: PolicyVersion, chain: str) -> list[CommitRecord]:
        """Return the undone steps from the position of `trained_at` to `chain`, oldest first. They differ only in
        whether they were skipped."""
        known = self._by_chain.get(chain, {})
        return [commit for commit in known.values() if tree.staleness(commit.trained_at, trained_at) == 0]

    def repeated(self, tree: VersionTree, trained_at: PolicyVersion, chain: str) -> PolicyVersion | None:
        """Return the version after an undone step from `trained_at` to `chain` that was not skipped."""
        if not tree.repeats(trained_at):
            return None
        done = (commit.version for commit in self.matches(tree, trained_at, chain) if not commit.skipped)
        return next(done, None)

    def predict(
        self, tree: VersionTree, head: PolicyVersion, chain: str, batches: Sequence[BatchRecord]
    ) -> ExpectedPath:
        """Return the predicted result of training these batches in order, starting from `head` and `chain`: a repeated
        step has the same outcome as before, and a new one is assumed not to be skipped."""
        version = head
        for batch in batches:
            chain = extend_chain(chain, digest_of(batch))
            known = self.matches(tree, version, chain) if tree.repeats(version) else []
            if known and known[-1].skipped:
                continue
            version = PolicyVersion(version.epoch, version.step + 1)
            if known:
                tree = tree.following(version.epoch, known[-1].version)
        return ExpectedPath(version, tree)


def digest_of(batch: BatchRecord) -> bytes:
    """Return the link that a batch adds to the hash chain, computed from its record."""
    return batch_digest(batch.batch_id, tuple((member.rollout_id, member.attempt) for member in batch.members))
