"""`headrace ledger verify`: recompute what must hold from the rows and the checkpoints, not from the buffer's own
words.

Invariants:
- Pure reading: see `evidence`. It works on a run whose process was killed and on one that is running.
- The surviving path, every rollout's state, every staleness and the hash chain are derived again from attempts,
  commits and forks, and compared with what is stored; so are baselines and advantages (`verify_groups`).
- A resumed line counts as the line before it only as far as the hash chains of their steps agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from headrace.buffer.classification import FAILED, trained_tokens
from headrace.buffer.evidence import read_evidence, read_trajectories
from headrace.buffer.outages import COUNTED
from headrace.buffer.records import Action, BatchState, FilterReason, GroupState, RolloutState
from headrace.buffer.types import Cause, batch_digest, extend_chain
from headrace.buffer.verify_groups import group_problems
from headrace.buffer.versions import PolicyVersion

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.buffer.evidence import Evidence, Witness
    from headrace.buffer.records import AttemptRecord, BatchRecord, CommitRecord, RolloutRecord
    from headrace.buffer.types import BatchId, RolloutId

_LIVE = frozenset({RolloutState.WAITING, RolloutState.SEALED, RolloutState.LEASED, RolloutState.TRAINED})
_UNTRAINED_ENDS = {
    GroupState.OPEN: {RolloutState.WAITING},
    GroupState.SEALED: {RolloutState.SEALED, RolloutState.EVICTED, RolloutState.FILTERED},
    GroupState.DROPPED: {RolloutState.FILTERED},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """`issued` counts the rollouts of all opened groups and equals the sum of the counts from `trained` to
    `cancelled`: `pending` never had an attempt, or had one that was evicted; `infra` wait for their next one;
    `cancelled` do too, or were left out when their group was sealed. Staleness is in optimizer updates;
    `max_staleness` is the bound of the newest step. `lost` counts rollouts whose stored state their history does not
    support, `trained_twice` those in more than one step of the surviving path. What operators did: `batches_dropped`,
    whose rollouts are among the filtered, and how many lost results were `retried`."""

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
        """Nothing contradicts."""
        return not self.problems


def verify(run_dir: Path) -> VerifyReport:
    """Check a run directory. Raises LedgerRefused when it holds no readable ledger."""
    return audit(read_evidence(run_dir))


def audit(evidence: Evidence) -> VerifyReport:
    """`verify` for who has read the evidence; trajectories are read here."""
    return _Audit(evidence).report()


def lost_rollouts(evidence: Evidence) -> dict[RolloutId, str]:
    """What `audit` counts as lost, with the reason."""
    auditing = _Audit(evidence)
    auditing.report()
    return auditing.lost


class _Audit:
    """One pass over the evidence; findings gather in `problems`."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.problems = list(evidence.damage)
        self.batches = {batch.batch_id: batch for batch in evidence.batches}
        self.attempts = {attempt.key: attempt for attempt in evidence.attempts}
        self.tree = evidence.tree()
        self.path = self._surviving_path()
        self.retried = {
            (entry.subject, entry.attempt) for entry in evidence.interventions if entry.action is Action.RETRY_LOST
        }
        self.lost: dict[RolloutId, str] = {}

    def report(self) -> VerifyReport:
        self._check_forks()
        self._check_chain()
        trained = self._trained()
        self._check_states(trained)
        self._check_dropped()
        self.problems += group_problems(self.evidence)
        self._check_trajectories()
        staleness = self._staleness()
        for witness in self.evidence.witnesses:
            self._check_witness(witness)
        self._check_recorded_checkpoints()
        counts = Counter(self._count_as(rollout) for rollout in self.evidence.rollouts)
        bounds = [commit.max_staleness for commit in self.path]
        return VerifyReport(
            issued=len(self.evidence.rollouts),
            **{name: counts[name] for name in _COUNTS},
            trained_twice=sum(times > 1 for times in trained.values()),
            lost=len(self.lost),
            steps=sum(not commit.skipped for commit in self.path),
            steps_skipped=sum(commit.skipped for commit in self.path),
            steps_rolled_back=len(self.evidence.commits) - len(self.path),
            max_staleness=bounds[-1] if bounds else None,
            max_staleness_seen=max(staleness, default=0),
            mean_staleness=sum(staleness) / len(staleness) if staleness else 0.0,
            checkpoints=len(self.evidence.witnesses),
            batches_dropped=tuple(
                batch.batch_id for batch in self.batches.values() if batch.state is BatchState.DROPPED
            ),
            retried=len(self.retried),
            problems=tuple(self.problems),
        )

    def _surviving_path(self) -> list[CommitRecord]:
        """Replay the forks: each epoch keeps the steps up to the chain it was opened at."""
        path: list[CommitRecord] = []
        for epoch in self.evidence.epochs:
            kept = [""] + [commit.chain for commit in path]
            if epoch.chain not in kept:
                self.problems.append(f"epoch {epoch.epoch} was opened at a chain that the path before it does not have")
            else:
                path = path[: kept.index(epoch.chain)]
            path += [commit for commit in self.evidence.commits if commit.epoch == epoch.epoch]
        if self.evidence.surviving != path:
            self.problems.append("the steps marked as undone are not those that the forks undid")
        return path

    def _check_forks(self) -> None:
        """No epoch follows an earlier one further than both were trained on the same batches. Places are numbered by
        the steps that lead to them, whatever the versions are called."""
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

    def _check_chain(self) -> None:
        chain, before = "", None
        for commit in self.path:
            batch = self.batches.get(commit.batch_id)
            if batch is None:
                self.problems.append(f"step {commit.sequence} trained the unknown batch {commit.batch_id}")
                continue
            chain = extend_chain(chain, _digest(batch))
            if commit.chain != chain:
                self.problems.append(f"step {commit.sequence}: the hash chain does not follow from its batches")
                chain = commit.chain
            if before is not None and self.tree.staleness(commit.trained_at, before) != 0:
                self.problems.append(f"step {commit.sequence} was trained at {commit.trained_at}, after {before}")
            updates = commit.version.step - commit.trained_at.step
            if commit.version.epoch != commit.trained_at.epoch or updates != (0 if commit.skipped else 1):
                self.problems.append(f"step {commit.sequence} goes from {commit.trained_at} to {commit.version}")
            before = commit.version

    def _trained(self) -> Counter[RolloutId]:
        """How many steps of the surviving path each rollout is in."""
        steps = (self.batches[commit.batch_id] for commit in self.path if commit.batch_id in self.batches)
        trained = Counter(member.rollout_id for batch in steps for member in batch.members)
        twice = sorted(rollout_id for rollout_id, times in trained.items() if times > 1)
        if twice:
            self.problems.append(f"{len(twice)} rollouts were trained more than once, {twice[0]} first")
        return trained

    def _check_states(self, trained: Counter[RolloutId]) -> None:
        held = {
            state: {
                member.rollout_id for batch in self.batches.values() if batch.state is state for member in batch.members
            }
            for state in BatchState
        }
        groups = {group.group_id: group for group in self.evidence.groups}
        if [group.ordinal for group in self.evidence.groups] != list(range(len(groups))):
            self.problems.append("the ordinals of the groups have gaps")
        self._check_members()
        failures = Counter(attempt.rollout_id for attempt in self.evidence.attempts if attempt.charged_to in COUNTED)
        for rollout in self.evidence.rollouts:
            allowed = self._allowed(rollout, groups[rollout.group_id].state, held, trained)
            if rollout.state not in allowed:
                wanted = " or ".join(sorted(allowed))
                self._lose(rollout.rollout_id, f"is {rollout.state}, but its history says {wanted}")
            attempt = self.attempts.get((rollout.rollout_id, rollout.attempt))
            if rollout.state in _LIVE and (attempt is None or not attempt.offered):
                if not self._known_lost(rollout):
                    self._lose(rollout.rollout_id, f"is {rollout.state}, but no result of its attempt was ever offered")
            elif rollout.state in _LIVE and attempt is not None and attempt.reward != rollout.reward:
                self.problems.append(f"{rollout.rollout_id} has reward {rollout.reward}, its attempt {attempt.reward}")
            if failures[rollout.rollout_id] != rollout.failures:
                self.problems.append(f"{rollout.rollout_id} counts {rollout.failures} failures, not its attempts'")
            reserved = rollout.state is RolloutState.SEALED and rollout.batch_id is not None
            if reserved != (rollout.rollout_id in held[BatchState.QUEUED]):
                self._lose(rollout.rollout_id, "is held for a batch that does not wait, or the other way round")

    def _check_dropped(self) -> None:
        """Batches are dropped by operators only, and all of their members with them."""
        noted = {entry.subject for entry in self.evidence.interventions if entry.action is Action.DROP_BATCH}
        dropped = {batch.batch_id for batch in self.batches.values() if batch.state is BatchState.DROPPED}
        for batch_id in sorted(noted ^ dropped):
            self.problems.append(f"{batch_id} was dropped without an entry in the journal, or the other way round")
        members = {member.rollout_id for batch_id in dropped for member in self.batches[batch_id].members}
        for rollout in self.evidence.rollouts:
            if (rollout.reason is FilterReason.BATCH_DROPPED) != (rollout.rollout_id in members):
                self._lose(rollout.rollout_id, "was filtered for a batch that was not dropped, or the other way round")

    def _check_members(self) -> None:
        """Every group was issued whole, and all of one size."""
        members: dict[str, list[int]] = {}
        for rollout in self.evidence.rollouts:
            members.setdefault(rollout.group_id, []).append(rollout.member)
        size = max(map(len, members.values()), default=0)
        for group in self.evidence.groups:
            if sorted(members.get(group.group_id, [])) != list(range(size)):
                self.problems.append(f"{group.group_id} lacks members of its {size}: rollouts are missing")

    def _allowed(
        self,
        rollout: RolloutRecord,
        group: GroupState,
        held: dict[BatchState, set[RolloutId]],
        trained: Counter[RolloutId],
    ) -> set[RolloutState]:
        """The states that a rollout's attempts, group and batches allow."""
        if trained[rollout.rollout_id]:
            return {RolloutState.TRAINED}
        if rollout.rollout_id in held[BatchState.LEASED]:
            return {RolloutState.LEASED}
        if rollout.rollout_id in held[BatchState.DROPPED]:
            return {RolloutState.FILTERED}
        attempt = self.attempts.get((rollout.rollout_id, rollout.attempt))
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

    def _check_trajectories(self) -> None:
        """What may still be trained, or be trained again after a return to the last checkpoint, must be readable and
        as recorded."""
        closed = {group.group_id for group in self.evidence.groups if group.closed}
        wanted = {
            (rollout.rollout_id, rollout.attempt)
            for rollout in self.evidence.rollouts
            if rollout.state in _LIVE and rollout.group_id not in closed and not self._known_lost(rollout)
        }
        with_tokens = {key for key in wanted if key in self.attempts and self.attempts[key].trained}
        for key, trajectory in read_trajectories(self.evidence, with_tokens):
            if trajectory is None:
                self._lose(key[0], f"attempt {key[1]}: its trajectory is missing or damaged")
            elif trained_tokens(trajectory, self.tree) != self.attempts[key].trained:
                self.problems.append(f"{key[0]} attempt {key[1]}: its spans are not those of its trajectory")

    def _staleness(self) -> list[int]:
        """Of every rollout in an updating or skipped step of the surviving path, from stored spans and the step's
        version."""
        seen = []
        for commit in self.path:
            batch = self.batches.get(commit.batch_id)
            for member in batch.members if batch else ():
                attempt = self.attempts.get((member.rollout_id, member.attempt))
                if attempt is None or not attempt.trained:
                    self.problems.append(
                        f"step {commit.sequence} trained {member.rollout_id}, which has no trained token"
                    )
                    continue
                staleness = self._staleness_of(attempt, commit.trained_at)
                seen.append(staleness)
                if staleness > commit.max_staleness:
                    self.problems.append(
                        f"{member.rollout_id} was trained at staleness {staleness} > {commit.max_staleness}"
                    )
                if staleness != member.staleness:
                    self.problems.append(f"{member.rollout_id} has staleness {staleness}, stored is {member.staleness}")
        return seen

    def _staleness_of(self, attempt: AttemptRecord, trained_at: PolicyVersion) -> int:
        return max(self.tree.staleness(trained_at, part.version) for part in attempt.trained)

    def _check_witness(self, witness: Witness) -> None:
        """A checkpoint's account must be a stretch of the ledger's history, on the surviving path or undone."""
        name = witness.path.name
        digests = (digest for _, digest in witness.batches)
        if reduce(extend_chain, digests, witness.previous_chain) != witness.chain:
            self.problems.append(f"checkpoint {name}: its batches do not give its hash chain")
        names = {(commit.chain, commit.version) for commit in self.evidence.commits} | {("", PolicyVersion(1, 0))}
        for epoch in self.evidence.epochs:
            if (epoch.chain, epoch.parent) in names:
                names.add((epoch.chain, PolicyVersion(epoch.epoch, epoch.parent.step if epoch.parent else 0)))
        if (witness.chain, witness.version) not in names:
            self.problems.append(f"checkpoint {name}: the ledger has no step with its version and hash chain")
        for batch_id, digest in witness.batches:
            batch = self.batches.get(batch_id)
            if batch is None or _digest(batch) != digest:
                self.problems.append(f"checkpoint {name}: batch {batch_id} is not the ledger's")

    def _check_recorded_checkpoints(self) -> None:
        chains = {witness.version: witness.chain for witness in self.evidence.witnesses}
        for checkpoint in self.evidence.checkpoints:
            if chains.get(checkpoint.version, checkpoint.chain) != checkpoint.chain:
                self.problems.append(
                    f"checkpoint {checkpoint.version}: directory and ledger have different hash chains"
                )

    def _count_as(self, rollout: RolloutRecord) -> str:
        attempt = self.attempts.get((rollout.rollout_id, rollout.attempt))
        if rollout.state is not RolloutState.PENDING or attempt is None or attempt.reward is not None:
            return rollout.state.value
        return "cancelled" if attempt.cause is Cause.CANCELLED else "infra"

    def _known_lost(self, rollout: RolloutRecord) -> bool:
        """An operator accepted that the result is lost of what a checkpoint's weights hold already."""
        return rollout.state is RolloutState.TRAINED and (rollout.rollout_id, rollout.attempt) in self.retried

    def _lose(self, rollout_id: RolloutId, why: str) -> None:
        self.lost.setdefault(rollout_id, why)
        self.problems.append(f"{rollout_id} {why}")


_COUNTS = (*(state.value for state in RolloutState), "infra")


def _digest(batch: BatchRecord) -> bytes:
    return batch_digest(batch.batch_id, tuple((member.rollout_id, member.attempt) for member in batch.members))
