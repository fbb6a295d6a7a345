"""Batches: taken, committed, released, rolled back.

Invariants:
- No member is leased whose staleness at the batch's version exceeds the bound, by committed steps alone; a commit is
  accepted only at that version, in the order taken. Hence nothing is trained over the bound.
- A lease counts as a try of its batch until it is committed or given back: a learner that dies in a step leaves the
  count behind. After `batch_tries` the batch is not issued any more, and `take` says why.
- Only the newest epoch takes and commits; every surviving step extends the hash chain of the one before.
- A released or rolled-back batch is issued again as the same batch (id and ordered members), before any fresh one,
  unless a member went over the bound: then that member is evicted and the others are sealed rollouts like any.
- Fresh batches hold the stalest rollouts first, then those sealed first: who came late through no fault of its own is
  trained before it goes over the bound.
- A step that repeats an undone one leads to its place in the version tree, so that a resume makes nothing stale. What
  no batch holds is judged at the version that the batches issued again lead to: it cannot be trained before.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import nsmallest
from typing import TYPE_CHECKING

from headrace.buffer.core.eviction import evict
from headrace.buffer.core.records import (
    BatchMember,
    BatchRecord,
    BatchState,
    CheckpointRecord,
    CommitRecord,
    EpochRecord,
    RolloutState,
)
from headrace.buffer.core.repeated_steps import digest_of
from headrace.buffer.errors import (
    BatchUntrainable,
    CheckpointMissing,
    DataExhausted,
    LeaseError,
    LedgerBehind,
    LedgerMismatch,
    StaleEpoch,
    VersionMismatch,
)
from headrace.buffer.sanitizer import clean_text, plain_metrics
from headrace.buffer.types import BatchId, extend_chain
from headrace.buffer.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from headrace.buffer.core.config import BufferConfig
    from headrace.buffer.core.records import AttemptRecord
    from headrace.buffer.core.state import ReplayState, Versions
    from headrace.buffer.core.task_history import TaskHistory
    from headrace.buffer.types import BatchLease, CheckpointRef, RolloutId, StepReport


class BatchBook:
    """The side of the buffer that faces the learner."""

    def __init__(self, state: ReplayState, config: BufferConfig, history: TaskHistory) -> None:
        self._state, self._config, self._history = state, config, history

    def lease_at(self, version: PolicyVersion, epoch: int) -> BatchRecord | None:
        """The lease at `version`, if it was taken already. Changes nothing.

        Otherwise `version` must be the head plus the outstanding leases. Raises StaleEpoch, VersionMismatch.
        """
        self._fence(epoch)
        leases = self._state.leases()
        for lease in leases:
            if lease.version == version:
                return lease
        head = self._head()
        if version != PolicyVersion(epoch, head.step + len(leases)):
            raise VersionMismatch(
                f"take at version {version}, but the ledger is at {head} with {len(leases)} batches leased: "
                "pass the version the batch will be trained at"
            )
        return None

    def take(self, version: PolicyVersion, epoch: int, now: float) -> BatchRecord | None:
        """Lease the first queued batch that may be trained at `version`, which `lease_at` found in order, else a fresh
        one; None when there is none yet."""
        self._settle_queue(version)
        self._evict_sealed(self._state.horizon(version))
        return self._lease_next(version, epoch, now)

    def refuse_exhausted(self) -> None:
        """For a data set that has no more groups to open: raises DataExhausted when no batch can be filled any more."""
        counts = {state: len(rollouts) for state, rollouts in self._state.by_state.items()}
        left = sum(counts[state] for state in (RolloutState.PENDING, RolloutState.IN_FLIGHT, RolloutState.WAITING))
        left += self._state.free_count()
        if left < self._config.batch_size and not self._state.queue():
            raise DataExhausted(
                f"the data set is used up: {left} rollouts are left over, a batch needs {self._config.batch_size}; "
                "raise buffer.passes, or lower buffer.batch_size to train them"
            )

    def commit(self, lease: BatchLease, report: StepReport, now: float) -> None:
        """The step on this batch is done. Raises StaleEpoch, LeaseError, VersionMismatch."""
        self._fence(lease.epoch)
        batch = self._state.batches.get(lease.batch_id)
        if batch is None or batch.epoch != lease.epoch or report.batch_id != lease.batch_id:
            raise LeaseError(f"batch {lease.batch_id} is not leased to epoch {lease.epoch}")
        if batch.state is BatchState.COMMITTED:
            return
        if batch not in self._state.leases()[:1]:
            raise LeaseError(
                f"batch {lease.batch_id} is {batch.state} and not the oldest lease: commit in the order taken"
            )
        trained_at = batch.version
        after = trained_at if report.skipped else PolicyVersion(trained_at.epoch, trained_at.step + 1)
        if report.version != after:
            raise VersionMismatch(f"step on {lease.batch_id} reports version {report.version}, expected {after}")
        self._commit(batch, report, after, now)
        if report.skipped:
            self._restamp_leases()

    def refuse_untrainable(self) -> None:
        """Raises BatchUntrainable when the next batch was tried as often as it may be."""
        batch = next(iter(self._state.queue()), None)
        if batch is not None and batch.tries >= self._config.batch_tries:
            raise BatchUntrainable(untrainable(batch, self._state.attempts))

    def step_failed(self, lease: BatchLease, reason: str, *, again: bool) -> str:
        """Record why the step on a leased batch failed; the verdict when it may not be tried again, else empty. A try
        that is made at once counts now. Raises StaleEpoch, LeaseError."""
        batch = replace(self._leased(lease), failure=clean_text(reason))
        allowed = batch.tries < self._config.batch_tries
        self._state.count("steps_failed")
        self._state.put(replace(batch, tries=batch.tries + (allowed and again)))
        return "" if allowed else untrainable(batch, self._state.attempts)

    def step_interrupted(self, lease: BatchLease) -> None:
        """The step on a leased batch did not count as a try. Raises StaleEpoch, LeaseError."""
        batch = self._leased(lease)
        self._state.put(replace(batch, tries=max(0, batch.tries - 1)))

    def retry_batches(self) -> None:
        """Begin to count tries anew."""
        for batch in (*self._state.leases(), *self._state.queue()):
            self._state.put(replace(batch, tries=0, failure=""))

    def _leased(self, lease: BatchLease) -> BatchRecord:
        self._fence(lease.epoch)
        batch = self._state.batches.get(lease.batch_id)
        if batch is None or batch.state is not BatchState.LEASED or batch.epoch != lease.epoch:
            raise LeaseError(f"batch {lease.batch_id} is not leased to epoch {lease.epoch}")
        return batch

    def release(self, lease: BatchLease) -> None:
        """Give a batch back before its step began. Raises StaleEpoch, LeaseError."""
        self._fence(lease.epoch)
        batch = self._state.batches.get(lease.batch_id)
        if batch is None or batch.state is BatchState.COMMITTED or batch.epoch != lease.epoch:
            raise LeaseError(f"batch {lease.batch_id} is not leased to epoch {lease.epoch}")
        if batch.state is not BatchState.LEASED:
            return
        if batch != self._state.leases()[-1]:
            raise LeaseError(f"batch {lease.batch_id} is not the newest lease: release in the reverse order taken")
        self._state.count("batches_released")
        self._requeue([replace(batch, tries=max(0, batch.tries - 1))])

    def checkpointed(self, ref: CheckpointRef, now: float) -> None:
        """Record a durable checkpoint directory; idempotent. Raises StaleEpoch, LedgerMismatch."""
        known = self._state.checkpoints.get(ref.version)
        if known is not None and known.chain == ref.chain:
            return
        self._fence(ref.version.epoch)
        self._record(ref, self._sequence_of(ref), now)

    def open_epoch(self, checkpoint: CheckpointRef | None, now: float, *, from_start: bool = False) -> PolicyVersion:
        """A new learner incarnation at `checkpoint` (None: from the start). Steps after it are undone. Where one was
        recorded, none is taken only `from_start`. Raises LedgerMismatch, LedgerBehind, CheckpointMissing, with nothing
        changed."""
        if checkpoint is None and not from_start:
            self.refuse_without_checkpoint()
        sequence = self._sequence_of(checkpoint) if checkpoint else 0
        if self.needs_history(checkpoint):
            raise LedgerMismatch("this undoes steps on forgotten batches: recall them from the ledger's archive first")
        epoch = self._state.epoch + 1
        undone = [commit for number, commit in sorted(self._state.commits.items()) if number > sequence]
        again = [self._state.batches[commit.batch_id] for commit in undone] + self._left_behind()
        for commit in undone:
            self._state.put(replace(commit, rolled_back_by=epoch))
        if undone:
            self._state.count("batches_rolled_back", len(undone))
        self._requeue(again)
        if checkpoint and checkpoint.version not in self._state.checkpoints:
            self._record(checkpoint, sequence, now)
        parent = checkpoint.version if checkpoint else (PolicyVersion(1, 0) if epoch > 1 else None)
        chain = checkpoint.chain if checkpoint else ""
        self._state.put(EpochRecord(epoch=epoch, parent=parent, chain=chain, opened_at_s=now, follows=parent))
        return self._head()

    def _left_behind(self) -> list[BatchRecord]:
        """The batches that were leased, then those that wait, with the tries that count: only the oldest lease was
        being trained. Where one learner after the other dies in other steps, it is not the batches that end them."""
        leases, queue = self._state.leases(), self._state.queue()
        unbegun = [replace(batch, tries=max(0, batch.tries - 1)) for batch in leases[1:]]
        if leases and leases[0].tries:
            queue = [batch if batch.failure else replace(batch, tries=0) for batch in queue]
        return [*leases[:1], *unbegun, *queue]

    def refuse_without_checkpoint(self) -> None:
        """Raises CheckpointMissing when the surviving path has a recorded checkpoint."""
        chains = {commit.chain for commit in self._state.commits.values()}
        recorded = [record.version for record in self._state.checkpoints.values() if record.chain in chains]
        if recorded:
            raise CheckpointMissing(
                f"the ledger recorded checkpoint {max(recorded)}, and the learner has none: put the run's checkpoints "
                "back, or train all steps again with `headrace resume --from-start`"
            )

    def needs_history(self, checkpoint: CheckpointRef | None) -> bool:
        """Whether opening at `checkpoint` undoes steps that were forgotten, or whose batches were."""
        chain = checkpoint.chain if checkpoint else ""
        commits = list(self._state.commits.values())
        places = [place for place, commit in enumerate(commits) if commit.chain == chain]
        if not places and (chain or self._state.steps_closed):
            return self._state.steps_closed > 0
        undone = commits[places[0] + 1 :] if places else commits
        return any(commit.batch_id not in self._state.batches for commit in undone)

    def trained_after(self, checkpoint: CheckpointRef | None) -> set[RolloutId]:
        """Rollouts of the steps that opening at `checkpoint` undoes, as far as their batches are known. Raises
        LedgerMismatch, LedgerBehind."""
        sequence = self._sequence_of(checkpoint) if checkpoint else 0
        undone = (commit.batch_id for number, commit in self._state.commits.items() if number > sequence)
        batches = (self._state.batches[batch_id] for batch_id in undone if batch_id in self._state.batches)
        return {member.rollout_id for batch in batches for member in batch.members}

    def staleness(self, rollout_id: RolloutId, version: PolicyVersion) -> int:
        """Of the rollout's trajectory, trained at `version`: the path to the oldest version that sampled a trained
        token."""
        return self._stalest(self._state.versions_of(rollout_id), version)

    def _head(self) -> PolicyVersion:
        head = self._state.head
        if head is None:
            raise StaleEpoch("no learner incarnation is open: call open_epoch first")
        return head

    def _fence(self, epoch: int) -> None:
        if epoch != self._state.epoch or epoch < 1:
            raise StaleEpoch(f"epoch {epoch} is not the open one ({self._state.epoch}): this learner must end")

    def _stalest(self, versions: Versions, version: PolicyVersion) -> int:
        return max(self._state.staleness(version, sampled) for sampled in versions)

    def _is_within(self, rollouts: Iterable[RolloutId], version: PolicyVersion) -> bool:
        """Whether none is over the bound by committed steps alone. Ahead of other leases it may depend on these, which
        may be skipped."""
        sampled = {each for rollout_id in rollouts for each in self._state.versions_of(rollout_id)}
        return all(self._state.tree.staleness(version, each) <= self._config.max_staleness for each in sampled)

    def _settle_queue(self, version: PolicyVersion) -> None:
        """Dissolve batches at the front of the queue that cannot be issued again as they were."""
        for batch in self._state.queue():
            members = [member.rollout_id for member in batch.members]
            bound = self._config.max_staleness
            over = {rollout_id for rollout_id in members if self.staleness(rollout_id, version) > bound}
            if not over:
                return
            self._state.put(replace(batch, state=BatchState.DISSOLVED, queue_order=None))
            self._state.count("batches_dissolved")
            for rollout_id in members:
                if rollout_id in over:
                    evict(self._state, self._history, rollout_id, version)
                else:
                    self._state.move(rollout_id, RolloutState.SEALED, batch_id=None)

    def _evict_sealed(self, version: PolicyVersion) -> None:
        """Evict the sealed rollouts over the bound that no queued batch holds."""
        bound = self._config.max_staleness
        free = self._state.free_by_versions
        over = [versions for versions in free if self._stalest(versions, version) > bound]
        for rollout_id in [rollout_id for versions in over for rollout_id in free[versions]]:
            evict(self._state, self._history, rollout_id, version)

    def _most_urgent(self, version: PolicyVersion) -> list[RolloutId]:
        """A batch of the free sealed rollouts, or nothing."""
        if self._state.free_count() < self._config.batch_size:
            return []
        ranked = [
            (-self._stalest(versions, version), self._state.age(rollout_id), rollout_id)
            for versions, rollouts in self._state.free_by_versions.items()
            for rollout_id in rollouts
        ]
        return [rollout_id for *_, rollout_id in nsmallest(self._config.batch_size, ranked)]

    def _lease_next(self, version: PolicyVersion, epoch: int, now: float) -> BatchRecord | None:
        """The first queued batch; a fresh one when none is queued. None also while it must wait for the leases before
        it to be committed."""
        queued = next(iter(self._state.queue()), None)
        if queued is not None:
            members = [member.rollout_id for member in queued.members]
            if not self._is_within(members, version):
                return None
            return self._lease(queued, members, version, epoch, now)
        fresh = self._most_urgent(version)
        if not fresh or not self._is_within(fresh, version):
            return None
        ordinal = self._state.next_batch
        batch = BatchRecord(
            batch_id=BatchId(f"b{ordinal:06d}"),
            ordinal=ordinal,
            state=BatchState.QUEUED,
            epoch=epoch,
            version=version,
            members=(),
            leased_at_s=now,
        )
        return self._lease(batch, fresh, version, epoch, now)

    def _lease(
        self,
        batch: BatchRecord,
        members: Iterable[RolloutId],
        version: PolicyVersion,
        epoch: int,
        now: float,
    ) -> BatchRecord:
        leased = [self._state.move(rollout_id, RolloutState.LEASED, batch_id=batch.batch_id) for rollout_id in members]
        batch = replace(
            batch,
            state=BatchState.LEASED,
            queue_order=None,
            tries=batch.tries + 1,
            epoch=self._state.epoch,
            version=version,
            members=tuple(
                BatchMember(
                    rollout_id=rollout.rollout_id,
                    attempt=rollout.attempt,
                    staleness=self.staleness(rollout.rollout_id, version),
                )
                for rollout in leased
            ),
            leased_at_s=now,
        )
        self._state.put(batch)
        return batch

    def _commit(self, batch: BatchRecord, report: StepReport, after: PolicyVersion, now: float) -> None:
        metrics, left_out = plain_metrics(report.metrics)
        if left_out:
            self._state.count("metrics_left_out", left_out)
        chain = extend_chain(self._state.chain, digest_of(batch))
        repeated = None if report.skipped else self._state.repeated(batch.version, chain)
        self._state.put(
            CommitRecord(
                sequence=self._state.next_commit,
                batch_id=batch.batch_id,
                epoch=batch.epoch,
                trained_at=batch.version,
                version=after,
                skipped=bool(report.skipped),
                chain=chain,
                max_staleness=self._config.max_staleness,
                committed_at_s=now,
                metrics=metrics,
            )
        )
        if repeated is not None:
            self._state.put(replace(self._state.epochs[batch.epoch], follows=repeated))
        self._state.put(replace(batch, state=BatchState.COMMITTED, tries=0, failure=""))
        for member in batch.members:
            self._state.move(member.rollout_id, RolloutState.TRAINED)

    def _record(self, ref: CheckpointRef, sequence: int, now: float) -> None:
        self._state.put(
            CheckpointRecord(
                version=ref.version, path=ref.path, batch_ids=ref.batch_ids, chain=ref.chain, recorded_at_s=now
            )
        )
        self._state.close_covered(sequence)

    def _restamp_leases(self) -> None:
        """A skipped step left the version where it was: the batches taken ahead are trained one version earlier."""
        for batch in self._state.leases():
            version = PolicyVersion(batch.epoch, batch.version.step - 1)
            members = tuple(
                replace(member, staleness=self.staleness(member.rollout_id, version)) for member in batch.members
            )
            self._state.put(replace(batch, version=version, members=members))

    def _requeue(self, batches: Sequence[BatchRecord]) -> None:
        """Put batches in front of the queue, in this order; those in the queue already may be among them."""
        named = {batch.batch_id for batch in batches}
        order = [*batches, *(batch for batch in self._state.queue() if batch.batch_id not in named)]
        for place, batch in enumerate(order):
            self._state.put(replace(batch, state=BatchState.QUEUED, queue_order=place, closed=False))
            for member in batch.members:
                self._state.move(member.rollout_id, RolloutState.SEALED, batch_id=batch.batch_id)
                group = self._state.groups[self._state.rollouts[member.rollout_id].group_id]
                if group.closed:
                    self._state.put(replace(group, closed=False))

    def _sequence_of(self, checkpoint: CheckpointRef) -> int:
        """The last step that `checkpoint` covers, 0 for none. Raises LedgerBehind, LedgerMismatch."""
        covered = [number for number, commit in self._state.commits.items() if commit.chain == checkpoint.chain]
        sequence = covered[0] if covered else 0
        if checkpoint.chain and not covered:
            missing = [batch_id for batch_id in checkpoint.batch_ids if not self._was_committed(batch_id)]
            if missing:
                raise LedgerBehind(
                    f"checkpoint {checkpoint.path} holds batches that the ledger has not committed ({missing[0]}...): "
                    "restore the ledger that belongs to it, or remove the checkpoint to resume from an earlier one"
                )
            raise LedgerMismatch(
                f"checkpoint {checkpoint.path} trained other batches than the ledger's surviving path: it is of "
                "another run or of an undone line; move it elsewhere to resume from the one before"
            )
        if checkpoint.version not in self._versions_at(sequence):
            raise LedgerMismatch(
                f"checkpoint {checkpoint.path} says version {checkpoint.version}; the ledger has another there: "
                "it is of a path that was rolled back, take another checkpoint"
            )
        return sequence

    def _was_committed(self, batch_id: BatchId) -> bool:
        """On the surviving path; batches older than those known here are in the ledger's archive."""
        known = [commit.batch_id for commit in self._state.commits.values()]
        forgotten = bool(known and self._state.steps_closed) and (len(batch_id), batch_id) < (len(known[0]), known[0])
        return forgotten or batch_id in known

    def _versions_at(self, sequence: int) -> set[PolicyVersion]:
        """The names of the weights after step `sequence` of the surviving path."""
        commit = self._state.commits.get(sequence)
        names = {commit.version if commit else PolicyVersion(1, 0)}
        for record in self._state.epochs.values():
            if record.parent in names and record.chain == (commit.chain if commit else ""):
                names.add(PolicyVersion(record.epoch, record.parent.step))
        return names


def untrainable(batch: BatchRecord, attempts: Mapping[RolloutId, AttemptRecord]) -> str:
    """Why no learner gets through a batch, in one line with the fix."""
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
        f"batch {batch.batch_id} was tried {batch.tries} times and not trained: {reason}. Leave it out with `headrace "
        f"ledger drop-batch RUN {batch.batch_id}`, or remove the cause and go on with `headrace resume RUN "
        "--retry-batch`"
    )
