"""Batches: queued, taken, committed and released.

Invariants:
- No member is leased whose staleness at the batch's version, counted over committed steps alone, exceeds the bound; a
  commit is accepted only at that version, in the order taken. Hence nothing is trained over the bound.
- A lease counts as a try of its batch until it is committed or given back: a learner that dies in a step leaves the
  count behind. After `batch_tries` tries the batch is no longer issued, and `take` says why.
- A step that refuses rows trains nothing: the members with those rows are filtered, and the others are batched again.
- Only the newest epoch takes and commits; every surviving step extends the hash chain of the step before it.
- A released or rolled-back batch is issued again as the same batch (same id, same members in the same order), before
  any fresh one, unless a member exceeds the bound: then that member is evicted and the others become free sealed
  rollouts.
- Fresh batches hold the stalest rollouts first, then those sealed first: a rollout that finished late through no fault
  of its own is trained before it exceeds the bound. With several sources this holds within each, up to its quota.
- A step that repeats an undone one leads to the same position in the version tree, so that a resume makes nothing
  stale. Rollouts in no batch are judged at the version that the queued batches lead to, as they cannot be trained
  earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import nsmallest

from headrace.buffer.core.batch_queue import untrainable
from headrace.buffer.core.config import BufferConfig
from headrace.buffer.core.epochs import Epochs
from headrace.buffer.core.records import (
    BatchMember,
    BatchRecord,
    BatchState,
    CommitRecord,
    FilterReason,
    RolloutRecord,
    RolloutState,
)
from headrace.buffer.core.staleness import evict, stalest
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.core.task_sources.shares import Mix
from headrace.buffer.core.training_path import digest_of
from headrace.buffer.errors import DataExhausted, LeaseError, VersionMismatch
from headrace.buffer.trajectories.sanitizer import clean_text, plain_metrics
from headrace.buffer.trajectories.types import BatchId, BatchLease, RolloutId, StepReport, extend_chain
from headrace.buffer.trajectories.versions import PolicyVersion


class BatchBook:
    """The side of the buffer that faces the learner."""

    def __init__(
        self, state: ReplayState, config: BufferConfig, mix: Mix, history: TaskHistory, epochs: Epochs
    ) -> None:
        self._state, self._config, self._mix, self._history, self._epochs = state, config, mix, history, epochs
        self._bound, self._queue = config.bound, epochs.queue

    def take(self, version: PolicyVersion, epoch: int, now: float) -> BatchRecord | None:
        """Lease the first queued batch that may be trained at `version`, or else a fresh one. `lease_at` must have
        accepted the version. Return None when there is no batch yet, or when it must wait until earlier leases have
        been committed."""
        path = self._state.path
        self._queue.settle(version)
        # Free sealed rollouts are judged at the first version at which they can be trained.
        horizon, free, tree = path.horizon(version), self._state.free_by_versions, path.expected_tree
        over = [versions for versions in free if not self._bound.admits(tree, horizon, versions)]
        for rollout_id in [rollout_id for versions in over for rollout_id in free[versions]]:
            evict(self._state, self._history, rollout_id, horizon)
        batch = next(iter(path.queue()), None)
        if batch is not None:
            members = [member.rollout_id for member in batch.members]
        elif self.waits_for():
            return None
        else:
            members = self._fresh(version)
        # By committed steps alone: ahead of other leases the prediction depends on them, and they may be skipped.
        sampled = {each for rollout_id in members for each in self._state.versions_of(rollout_id)}
        if not self._bound.admits(path.tree, version, sampled):
            return None
        if batch is None:
            ordinal = path.next_batch
            batch = BatchRecord(
                batch_id=BatchId(f"b{ordinal:06d}"),
                ordinal=ordinal,
                state=BatchState.QUEUED,
                epoch=epoch,
                version=version,
                members=(),
                leased_at_s=now,
            )
        return self._lease(batch, members, version, now)

    def waits_for(self) -> dict[str, int]:
        """Return how many sealed rollouts the next fresh batch still lacks, by source; empty if it can be taken."""
        quotas = self._mix.quotas(self._state.given(), self._config.batch_size)
        return {
            name: quota - self._state.free[name] for name, quota in quotas.items() if quota > self._state.free[name]
        }

    def lease_at(self, version: PolicyVersion, epoch: int) -> BatchRecord | None:
        """Return the lease at `version`, if it has already been taken. Changes nothing.

        Otherwise `version` must be the head plus one step for each outstanding lease. Raises StaleEpoch,
        VersionMismatch.
        """
        self._epochs.fence(epoch)
        leases = self._state.path.leases()
        for lease in leases:
            if lease.version == version:
                return lease
        head = self._epochs.head()
        if version != PolicyVersion(epoch, head.step + len(leases)):
            raise VersionMismatch(
                f"take at version {version}, but the ledger is at {head} with {len(leases)} batches leased: "
                "pass the version the batch will be trained at"
            )
        return None

    def refuse_exhausted(self, source: str) -> None:
        """Raise DataExhausted when a source cannot fill its quota of a batch any more. Called when it has no further
        groups to open."""
        stock = self._state.stock[source]
        left = sum(stock[state] for state in (RolloutState.PENDING, RolloutState.IN_FLIGHT, RolloutState.WAITING))
        left += self._state.free[source]
        quota = self._mix.quotas(self._state.given(), self._config.batch_size)[source]
        if left < quota and not self._state.path.queue():
            used_up = f"source {source} is" if source else "the data set is"
            raise DataExhausted(
                f"{used_up} used up: {left} rollouts are left over, but a batch needs {quota}; "
                "raise buffer.passes, or lower buffer.batch_size to train them"
            )

    def commit(self, lease: BatchLease, report: StepReport, now: float) -> None:
        """Record the step on a batch. Raises StaleEpoch, LeaseError, VersionMismatch."""
        self._epochs.fence(lease.epoch)
        batch = self._state.path.batches.get(lease.batch_id)
        if batch is None or batch.epoch != lease.epoch or report.batch_id != lease.batch_id:
            raise LeaseError(f"batch {lease.batch_id} is not leased to epoch {lease.epoch}")
        if batch.state is BatchState.COMMITTED:
            return
        if batch not in self._state.path.leases()[:1]:
            raise LeaseError(
                f"batch {lease.batch_id} is {batch.state} and not the oldest lease: commit in the order taken"
            )
        trained_at = batch.version
        after = trained_at if report.skipped else PolicyVersion(trained_at.epoch, trained_at.step + 1)
        if report.version != after:
            raise VersionMismatch(f"step on {lease.batch_id} reports version {report.version}, expected {after}")
        self._commit(batch, report, after, now)
        if report.skipped:
            # The version stays where it was: the batches taken ahead are trained one version earlier.
            for ahead in self._state.path.leases():
                version = PolicyVersion(ahead.epoch, ahead.version.step - 1)
                members = tuple(
                    replace(member, staleness=self.staleness(member.rollout_id, version)) for member in ahead.members
                )
                self._state.put(replace(ahead, version=version, members=members))

    def step_failed(self, lease: BatchLease, reason: str, *, again: bool) -> str:
        """Record why the step on a leased batch failed. Return why it may not be tried again, or an empty string when
        it may. With `again` the next try begins now and counts; otherwise it begins with the next learner. Raises
        StaleEpoch, LeaseError."""
        batch = replace(self._leased(lease), failure=clean_text(reason))
        allowed = batch.tries < self._config.batch_tries
        self._state.count("steps_failed")
        self._state.put(replace(batch, tries=batch.tries + (allowed and again)))
        return "" if allowed else untrainable(batch, self._state.attempts)

    def step_interrupted(self, lease: BatchLease) -> None:
        """Record that the step on a batch ended for a reason that had nothing to do with the batch, so that it does not
        count as a try. Raises StaleEpoch, LeaseError."""
        batch = self._leased(lease)
        self._state.put(replace(batch, tries=max(0, batch.tries - 1)))

    def refuse_rows(self, lease: BatchLease, refused: Mapping[RolloutId, str]) -> None:
        """Filter the members that the learner refused (with its reasons); the other members become free sealed
        rollouts. Idempotent. Raises StaleEpoch, LeaseError."""
        known = self._state.path.batches.get(lease.batch_id)
        if known is not None and known.state is BatchState.DISSOLVED and known.epoch == lease.epoch:
            return
        batch = self._leased(lease)
        members = [member.rollout_id for member in batch.members if member.rollout_id in refused]
        if not members or batch != self._state.path.leases()[-1]:
            raise LeaseError(f"batch {lease.batch_id} has no refused member, or is not the newest lease")
        self._queue.dissolve(batch)
        for rollout_id in members:
            attempt = self._state.attempts[rollout_id]
            self._state.put(replace(attempt, detail=clean_text(f"refused by the learner: {refused[rollout_id]}")))
            self._state.move(rollout_id, RolloutState.FILTERED, reason=FilterReason.ROW_REFUSED)
        self._state.count(f"filtered_{FilterReason.ROW_REFUSED}", len(members))

    def release(self, lease: BatchLease) -> None:
        """Give a batch back before its step began. Raises StaleEpoch, LeaseError."""
        self._epochs.fence(lease.epoch)
        batch = self._state.path.batches.get(lease.batch_id)
        if batch is None or batch.state is BatchState.COMMITTED or batch.epoch != lease.epoch:
            raise LeaseError(f"batch {lease.batch_id} is not leased to epoch {lease.epoch}")
        if batch.state is not BatchState.LEASED:
            return
        if batch != self._state.path.leases()[-1]:
            raise LeaseError(f"batch {lease.batch_id} is not the newest lease: release the newest first")
        self._state.count("batches_released")
        self._queue.requeue([replace(batch, tries=max(0, batch.tries - 1))])

    def staleness(self, rollout_id: RolloutId, version: PolicyVersion) -> int:
        """Return the staleness of a rollout trained at `version`: its distance from the farthest version that sampled
        one of its trained tokens."""
        return stalest(self._state.path.expected_tree, version, self._state.versions_of(rollout_id))

    def _fresh(self, version: PolicyVersion) -> list[RolloutId]:
        """Return the members of a fresh batch: the oldest of each source, up to its quota."""
        tree, quotas = self._state.path.expected_tree, self._mix.quotas(self._state.given(), self._config.batch_size)
        ranked: dict[str, list[tuple[int, tuple[int, int], RolloutId]]] = {name: [] for name in quotas}
        for versions, rollouts in self._state.free_by_versions.items():
            over = -stalest(tree, version, versions)
            for rollout_id in rollouts:
                source = self._state.source_of(self._state.rollouts[rollout_id])
                ranked[source].append((over, self._state.age(rollout_id), rollout_id))
        chosen = [each for name, quota in quotas.items() for each in nsmallest(quota, ranked[name])]
        return [rollout_id for *_, rollout_id in sorted(chosen)]

    def _leased(self, lease: BatchLease) -> BatchRecord:
        self._epochs.fence(lease.epoch)
        batch = self._state.path.batches.get(lease.batch_id)
        if batch is None or batch.state is not BatchState.LEASED or batch.epoch != lease.epoch:
            raise LeaseError(f"batch {lease.batch_id} is not leased to epoch {lease.epoch}")
        return batch

    def _lease(
        self, batch: BatchRecord, members: Iterable[RolloutId], version: PolicyVersion, now: float
    ) -> BatchRecord:
        leased = [self._state.move(rollout_id, RolloutState.LEASED, batch_id=batch.batch_id) for rollout_id in members]
        batch = replace(
            batch,
            state=BatchState.LEASED,
            queue_order=None,
            tries=batch.tries + 1,
            epoch=self._state.path.epoch,
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
        path = self._state.path
        chain = extend_chain(path.chain, digest_of(batch))
        repeated = None if report.skipped else path.repeated(batch.version, chain)
        self._state.put(
            CommitRecord(
                sequence=path.next_commit,
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
            self._state.put(replace(path.epochs[batch.epoch], follows=repeated))
        self._state.put(replace(batch, state=BatchState.COMMITTED, tries=0, failure=""))
        for member in batch.members:
            self._state.move(member.rollout_id, RolloutState.TRAINED)


def carried_from(state: ReplayState, rollout: RolloutRecord) -> str:
    """Return the first batch of a rollout's group, if the rollout was carried over: it was still running when the group
    was sealed, and is in a later batch. Otherwise return ""."""
    if not rollout.late:
        return ""
    batches = [state.rollouts[member].batch_id for member in state.members[rollout.group_id].values()]
    # Ids grow with the number, in length first.
    first = min((each for each in batches if each is not None), key=lambda each: (len(each), each), default=None)
    return "" if first is None or first == rollout.batch_id else first
