"""The checks of `headrace ledger verify`, which use only rows and checkpoints and none of the buffer's own logic.

Invariants:
- The checks only read (see `evidence`): they work both for a run whose process was killed and for one that is still
  running.
- The surviving path, every rollout's state, every staleness and the hash chain are derived again from attempts,
  commits and forks, and compared with the stored values; so are baselines and advantages (`verify_groups`).
- A resumed line counts as the line before it only as far as the hash chains of their steps agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Final

from headrace.buffer.audit.evidence import Evidence, StreamedEvidence, Witness, read_trajectories, streamed
from headrace.buffer.audit.joined_rows import GroupHistory
from headrace.buffer.audit.verify_groups import GroupAudit
from headrace.buffer.core.classification import FAILED, trained_tokens
from headrace.buffer.core.outages import COUNTED
from headrace.buffer.core.records import (
    FINAL,
    AttemptRecord,
    BatchState,
    CommitRecord,
    FilterReason,
    GroupState,
    OperatorAction,
    RolloutRecord,
    RolloutState,
)
from headrace.buffer.core.source_names import ended_counter
from headrace.buffer.trajectories.types import BatchId, Cause, RolloutId, batch_digest, extend_chain
from headrace.buffer.trajectories.versions import PolicyVersion

Progress = Callable[[int, int], object]

PROGRESS_GROUPS: Final = 4096
"""Number of groups checked between two progress reports."""
_LIVE = frozenset({RolloutState.WAITING, RolloutState.SEALED, RolloutState.LEASED, RolloutState.TRAINED})
_UNTRAINED_ENDS = {
    GroupState.OPEN: {RolloutState.WAITING},
    GroupState.SEALED: {RolloutState.SEALED, RolloutState.EVICTED, RolloutState.FILTERED},
    GroupState.DROPPED: {RolloutState.FILTERED},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """Result of `verify`. `issued` counts the rollouts of all opened groups and equals the sum of the counts from
    `trained` to `cancelled`: `pending` rollouts never had an attempt, or had one that was evicted; `infra` rollouts
    wait for a new attempt after a failure; `cancelled` rollouts wait for one after a cancellation, or were left out
    when their group was sealed. Staleness is in optimizer updates; `max_staleness` is the bound of the newest step.
    `lost` counts rollouts whose stored state their history does not support, `trained_twice` those in more than one
    step of the surviving path. `batches_dropped` lists the batches that operators dropped, whose rollouts count as
    `filtered`; `retried` counts the lost results that operators retried."""

    issued: int
    trained: int
    leased: int
    sealed: int
    waiting: int
    in_flight: int
    pending: int
    evicted: int
    filtered: int
    infra: int
    poison: int
    cancelled: int
    trained_twice: int
    lost: int
    steps: int
    steps_skipped: int
    steps_rolled_back: int
    max_staleness: int | None
    max_staleness_seen: int
    mean_staleness: float
    checkpoints: int
    batches_dropped: tuple[BatchId, ...]
    retried: int
    problems: tuple[str, ...]

    @property
    def clean(self) -> bool:
        """True if no check failed."""
        return not self.problems


def verify(run_dir: Path, progress: Progress | None = None) -> VerifyReport:
    """Check a run directory. Raises LedgerRefused when it holds no readable ledger."""
    with streamed(run_dir) as evidence:
        return audit(evidence, progress)


def audit(evidence: Evidence | StreamedEvidence, progress: Progress | None = None) -> VerifyReport:
    """Check evidence that has already been read; trajectories are read here. `progress` is called with the number of
    groups checked so far and the total number of groups."""
    return _Audit(evidence).report(progress)


def lost_rollouts(evidence: Evidence | StreamedEvidence) -> dict[RolloutId, str]:
    """Return the rollouts that `audit` counts as lost, with the reason for each."""
    auditing = _Audit(evidence)
    auditing.report(None)
    return auditing.lost


@dataclass(frozen=True, slots=True)
class _Training:
    """Position of a rollout in a step of the surviving path."""

    commit: CommitRecord
    attempt: int
    staleness: int


class _Audit:
    """One pass over the batches and one over the groups; findings are collected in `problems`."""

    def __init__(self, evidence: Evidence | StreamedEvidence) -> None:
        self.evidence = evidence
        self.problems = list(evidence.damage)
        self.tree = evidence.tree()
        self.path = self._surviving_path()
        self.retried = {
            (entry.subject, entry.attempt)
            for entry in evidence.interventions
            if entry.action is OperatorAction.RETRY_LOST
        }
        self.lost: dict[RolloutId, str] = {}
        self.again: set[RolloutId] = set()
        self.digests: dict[BatchId, bytes] = {}
        self.held: dict[BatchState, set[RolloutId]] = {
            state: set() for state in (BatchState.LEASED, BatchState.QUEUED, BatchState.DROPPED, BatchState.DISSOLVED)
        }
        self.dropped: list[BatchId] = []
        self.trained: dict[RolloutId, tuple[_Training, ...]] = {}
        self.counts: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()

    def report(self, progress: Progress | None) -> VerifyReport:
        self._read_batches()
        self._check_forks()
        self._check_chain()
        twice = sorted(rollout_id for rollout_id, places in self.trained.items() if len(places) > 1)
        if twice:
            self.problems.append(f"{len(twice)} rollouts were trained more than once, {twice[0]} first")
        if self.evidence.closed is None:
            # Only operators drop batches.
            noted = {
                entry.subject for entry in self.evidence.interventions if entry.action is OperatorAction.DROP_BATCH
            }
            for batch_id in sorted(noted.symmetric_difference(self.dropped)):
                self.problems.append(f"{batch_id} was dropped without an entry in the journal, or the other way round")
        self._check_groups(progress or (lambda done, total: None))
        for witness in self.evidence.witnesses:
            self._check_witness(witness)
        chains = {witness.version: witness.chain for witness in self.evidence.witnesses}
        for checkpoint in self.evidence.checkpoints:
            if chains.get(checkpoint.version, checkpoint.chain) != checkpoint.chain:
                self.problems.append(
                    f"checkpoint {checkpoint.version}: directory and ledger have different hash chains"
                )
        bounds = [commit.max_staleness for commit in self.path]
        seen = self.staleness.total()
        return VerifyReport(
            issued=self.counts.total(),
            **{name: self.counts[name] for name in _COUNTS},
            trained_twice=len(twice),
            lost=len(self.lost),
            steps=sum(not commit.skipped for commit in self.path),
            steps_skipped=sum(commit.skipped for commit in self.path),
            steps_rolled_back=len(self.evidence.commits) - len(self.path),
            max_staleness=bounds[-1] if bounds else None,
            max_staleness_seen=max(self.staleness, default=0),
            mean_staleness=sum(value * count for value, count in self.staleness.items()) / seen if seen else 0.0,
            checkpoints=len(self.evidence.witnesses),
            batches_dropped=tuple(self.dropped),
            retried=len(self.retried),
            problems=tuple(self.problems),
        )

    def _surviving_path(self) -> list[CommitRecord]:
        """Return the surviving steps, derived from the forks: each epoch keeps the steps up to the chain at which it
        was opened."""
        if self.evidence.closed is not None:
            return self.evidence.surviving
        path: list[CommitRecord] = []
        for epoch in self.evidence.epochs:
            kept = [""] + [commit.chain for commit in path]
            if epoch.chain not in kept:
                self.problems.append(f"epoch {epoch.epoch} was opened at a chain that is not on the path before it")
            else:
                path = path[: kept.index(epoch.chain)]
            path += [commit for commit in self.evidence.commits if commit.epoch == epoch.epoch]
        if self.evidence.surviving != path:
            self.problems.append("the steps marked as undone are not those that the forks undid")
        return path

    def _check_forks(self) -> None:
        """Check that no epoch counts as following an earlier one beyond the step up to which both were trained on the
        same batches. Places are numbered by the steps that lead to them, whatever the names of the versions."""
        if self.evidence.closed is not None:
            return
        by_epoch: dict[int, list[CommitRecord]] = {}
        for commit in self.evidence.commits:
            by_epoch.setdefault(commit.epoch, []).append(commit)
        places: dict[PolicyVersion, int] = {PolicyVersion(1, 0): 0}
        numbers: dict[tuple[int | None, str], int] = {}
        for epoch in self.evidence.epochs:
            parent = epoch.parent or PolicyVersion(1, 0)
            places[PolicyVersion(epoch.epoch, parent.step)] = places.get(parent, -1)
            for commit in by_epoch.get(epoch.epoch, ()):
                if not commit.skipped:
                    step = (places.get(commit.trained_at), commit.chain)
                    places[commit.version] = numbers.setdefault(step, len(numbers) + 1)
            follows = epoch.follows
            if follows is None:
                continue
            here = places.get(PolicyVersion(epoch.epoch, follows.step))
            if follows.epoch >= epoch.epoch or here is None or here != places.get(follows):
                self.problems.append(
                    f"epoch {epoch.epoch} counts as {follows} at step {follows.step}, but was trained on other batches"
                )

    def _read_batches(self) -> None:
        """Collect the digests of batches and the positions of their members."""
        steps: dict[BatchId, list[CommitRecord]] = {}
        for commit in self.path:
            steps.setdefault(commit.batch_id, []).append(commit)
        undone = {commit.batch_id for commit in self.evidence.undone}
        for batch in self.evidence.batches:
            if batch.batch_id in undone:
                self.again.update(member.rollout_id for member in batch.members)
            members = tuple((member.rollout_id, member.attempt) for member in batch.members)
            self.digests[batch.batch_id] = batch_digest(batch.batch_id, members)
            if batch.state in self.held:
                self.held[batch.state].update(member.rollout_id for member in batch.members)
            if batch.state is BatchState.DROPPED:
                self.dropped.append(batch.batch_id)
            for commit in steps.get(batch.batch_id, ()):
                for member in batch.members:
                    place = _Training(commit, member.attempt, member.staleness)
                    self.trained[member.rollout_id] = (*self.trained.get(member.rollout_id, ()), place)

    def _check_chain(self) -> None:
        chain, before = "", None
        path = self.path
        if self.evidence.closed is not None and path:
            # The steps before it are in the archive.
            chain, before, path = path[0].chain, path[0].version, path[1:]
        for commit in path:
            digest = self.digests.get(commit.batch_id)
            if digest is None:
                self.problems.append(f"step {commit.sequence} trained the unknown batch {commit.batch_id}")
                continue
            chain = extend_chain(chain, digest)
            if commit.chain != chain:
                self.problems.append(f"step {commit.sequence}: the hash chain does not follow from its batches")
                chain = commit.chain
            if before is not None and self.tree.staleness(commit.trained_at, before) != 0:
                self.problems.append(f"step {commit.sequence} was trained at {commit.trained_at}, after {before}")
            updates = commit.version.step - commit.trained_at.step
            if commit.version.epoch != commit.trained_at.epoch or updates != (0 if commit.skipped else 1):
                self.problems.append(f"step {commit.sequence} goes from {commit.trained_at} to {commit.version}")
            before = commit.version

    def _check_groups(self, progress: Progress) -> None:
        """Check every rollout and its attempts once."""
        total, ordinals = self.evidence.count("groups"), 0
        by_group = GroupAudit(self.retried, has_history=self.evidence.closed is None, source_of=self.evidence.source_of)
        wanted: dict[tuple[RolloutId, int], AttemptRecord] = {}
        ended: Counter[str] = Counter()
        for done, history in enumerate(self.evidence.histories()):
            if done % PROGRESS_GROUPS == 0:
                progress(done, total)
            ordinals = max(ordinals, history.group.ordinal + 1)
            source = self.evidence.source_of(history.group.task_id)
            for rollout in history.members:
                self._check_rollout(rollout, history)
                if source and rollout.state in FINAL:
                    ended[ended_counter(source, rollout.state)] += 1
                attempt = history.current(rollout)
                # Files that a checkpoint covers may be gone, also where a return to an earlier step opened a group.
                trained = rollout.state is RolloutState.TRAINED and bool(self.evidence.witnesses)
                covered = (history.group.closed or trained) and rollout.rollout_id not in self.again
                closed = covered or self._known_lost(rollout)
                if rollout.state in _LIVE and not closed and attempt is not None and attempt.trained:
                    wanted[attempt.key] = attempt
            self.problems += by_group.check(history)
        progress(total, total)
        whole = self.evidence.closed is None
        if whole and ordinals != total:
            self.problems.append("the ordinals of the groups have gaps")
        # The rollouts left have no row at all, unless their group is in an archive that is not read.
        for rollout_id, places in self.trained.items() if whole else ():
            self._check_staleness(rollout_id, places, {})
        self.problems += by_group.finish(self.evidence.tasks if whole else None)
        for name in sorted({*ended, *self.evidence.ended}) if whole else ():
            counted = self.evidence.ended.get(name, 0)
            if counted != ended[name]:
                self.problems.append(f"counter {name} is {counted}, but the ledger has {ended[name]} such rollouts")
        # A rollout that may still be trained, or be trained again after a return to the last checkpoint, needs a
        # trajectory that is readable and as recorded.
        for key, trajectory in read_trajectories(self.evidence, set(wanted)):
            if trajectory is None:
                self._lose(key[0], f"attempt {key[1]}: its trajectory is missing or damaged")
            elif trained_tokens(trajectory, self.tree) != wanted[key].trained:
                self.problems.append(f"{key[0]} attempt {key[1]}: its stored spans do not match its trajectory")

    def _check_rollout(self, rollout: RolloutRecord, history: GroupHistory) -> None:
        name, tries = rollout.rollout_id, history.attempts.get(rollout.rollout_id, ())
        attempt = history.current(rollout)
        trained = self.trained.pop(name, ())
        allowed = self._allowed(rollout, history.group.state, attempt, trained=bool(trained))
        if rollout.state not in allowed:
            self._lose(name, f"is {rollout.state}, but its history says {' or '.join(sorted(allowed))}")
        if rollout.state in _LIVE and (attempt is None or not attempt.offered):
            if not self._known_lost(rollout):
                self._lose(name, f"is {rollout.state}, but no result of its attempt was ever offered")
        elif rollout.state in _LIVE and attempt is not None and attempt.reward != rollout.reward:
            self.problems.append(f"{name} has reward {rollout.reward}, but its attempt has {attempt.reward}")
        if sum(one.charged_to in COUNTED for one in tries) != rollout.failures:
            self.problems.append(f"{name} counts {rollout.failures} failures, but its attempts show a different number")
        reserved = rollout.state is RolloutState.SEALED and rollout.batch_id is not None
        if reserved != (name in self.held[BatchState.QUEUED]):
            self._lose(name, "is held for a batch that is not queued, or the other way round")
        if (rollout.reason is FilterReason.BATCH_DROPPED) != (name in self.held[BatchState.DROPPED]):
            self._lose(name, "was filtered for a batch that was not dropped, or the other way round")
        # The batch may be in an archive that is not read.
        refused = rollout.reason is FilterReason.ROW_REFUSED and self.evidence.closed is None
        if refused and name not in self.held[BatchState.DISSOLVED]:
            self._lose(name, "was refused by the learner, but no dissolved batch held it")
        self._check_staleness(name, trained, {one.attempt: one for one in tries})
        count_as = rollout.state.value
        if rollout.state is RolloutState.PENDING and attempt is not None and attempt.reward is None:
            count_as = "cancelled" if attempt.cause is Cause.CANCELLED else "infra"
        self.counts[count_as] += 1

    def _allowed(
        self, rollout: RolloutRecord, group: GroupState, attempt: AttemptRecord | None, *, trained: bool
    ) -> set[RolloutState]:
        """Return the states that a rollout's attempts, group and batches allow."""
        if trained:
            return {RolloutState.TRAINED}
        if rollout.rollout_id in self.held[BatchState.LEASED]:
            return {RolloutState.LEASED}
        if rollout.rollout_id in self.held[BatchState.DROPPED]:
            return {RolloutState.FILTERED}
        left_out = {RolloutState.CANCELLED} if rollout.late and group is GroupState.SEALED else set()
        if attempt is None:
            return {RolloutState.PENDING, *left_out} if rollout.attempt == 0 else set()
        if attempt.ended_at_s is None:
            return {RolloutState.IN_FLIGHT}
        forked = any(epoch.epoch > attempt.version.epoch for epoch in self.evidence.epochs)
        retried = (rollout.rollout_id, rollout.attempt) in self.retried
        again = {RolloutState.PENDING} if rollout.evictions or forked or retried else set()
        if attempt.reward is not None:
            return {*_UNTRAINED_ENDS[group], *(again if group is GroupState.SEALED else ())}
        if attempt.cause in FAILED:
            return {RolloutState.PENDING, RolloutState.POISON, *left_out}
        return {RolloutState.PENDING, RolloutState.EVICTED, *left_out}

    def _check_staleness(
        self, rollout_id: RolloutId, places: tuple[_Training, ...], tries: Mapping[int, AttemptRecord]
    ) -> None:
        """Check the staleness of a rollout in every step of the surviving path that trained it, from its stored spans
        and the step's version."""
        for place in places:
            commit, attempt = place.commit, tries.get(place.attempt)
            if attempt is None or not attempt.trained:
                self.problems.append(f"step {commit.sequence} trained {rollout_id}, which has no trained token")
                continue
            staleness = max(self.tree.staleness(commit.trained_at, part.version) for part in attempt.trained)
            self.staleness[staleness] += 1
            if staleness > commit.max_staleness:
                self.problems.append(f"{rollout_id} was trained at staleness {staleness} > {commit.max_staleness}")
            if staleness != place.staleness:
                self.problems.append(f"{rollout_id} has staleness {staleness}, but {place.staleness} is stored")

    def _check_witness(self, witness: Witness) -> None:
        """Check that a checkpoint's batches are part of the ledger's history, on the surviving path or undone."""
        name = witness.path.name
        digests = (digest for _, digest in witness.batches)
        if reduce(extend_chain, digests, witness.previous_chain) != witness.chain:
            self.problems.append(f"checkpoint {name}: its hash chain does not follow from its batches")
        names = {(commit.chain, commit.version) for commit in self.evidence.commits} | {("", PolicyVersion(1, 0))}
        for epoch in self.evidence.epochs:
            if (epoch.chain, epoch.parent) in names:
                names.add((epoch.chain, PolicyVersion(epoch.epoch, epoch.parent.step if epoch.parent else 0)))
        if (witness.chain, witness.version) not in names:
            self.problems.append(f"checkpoint {name}: the ledger has no step with its version and hash chain")
        for batch_id, digest in witness.batches:
            known = self.digests.get(batch_id)
            if known != digest and (known is not None or self.evidence.closed is None):
                self.problems.append(f"checkpoint {name}: batch {batch_id} differs from that in the ledger")

    def _known_lost(self, rollout: RolloutRecord) -> bool:
        """Return whether an operator accepted the loss of a result that the weights of a checkpoint already contain."""
        return rollout.state is RolloutState.TRAINED and (rollout.rollout_id, rollout.attempt) in self.retried

    def _lose(self, rollout_id: RolloutId, why: str) -> None:
        self.lost.setdefault(rollout_id, why)
        self.problems.append(f"{rollout_id} {why}")


_COUNTS = (*(state.value for state in RolloutState), "infra")
