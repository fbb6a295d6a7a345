"""What a resume finds and what it will do, told from the run directory before anything is changed.

Invariants:
- Pure reading (see `evidence`): a killed run is told as it lies. What it says of batches is what `open_epoch` does:
  steps after the newest checkpoint are undone, and their batches are issued again, the same ones in the same order,
  then the batch that was leased, then those that waited to be issued again, and nothing fresh before them.
- Its time and memory depend on what is open, not on the length of the run: of closed groups it takes the ledger's
  totals. Deciles are of groups that are open.
- Lost is what `ledger verify` finds lost in open groups: rollouts whose state their history does not support, trained
  work of which the ledger knows nothing. It must be 0.
- A rollout's duration is that of its last attempt with a result; of an attempt in flight only a lower bound is known,
  to the newest time in the ledger.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from headrace.buffer.audit.evidence import read_open
from headrace.buffer.audit.verify import audit
from headrace.buffer.core.batch_queue import untrainable
from headrace.buffer.core.records import BatchState, RolloutState
from headrace.buffer.core.training_path import UndoneSteps, digest_of
from headrace.buffer.types import extend_chain
from headrace.buffer.versions import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from headrace.buffer.audit.evidence import Evidence, Witness
    from headrace.buffer.audit.verify import VerifyReport
    from headrace.buffer.core.records import AttemptRecord, BatchRecord, CommitRecord
    from headrace.buffer.types import RolloutId
    from headrace.buffer.versions import VersionTree

DECILES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationDecile:
    """Rollouts of open groups whose attempt took up to `upper_s` (None: no bound) and longer than the decile before;
    `again` are among the kept."""

    upper_s: float | None
    kept: int
    again: int
    restarted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """Rollouts by what becomes of them: `trained` stay trained; `sealed` and `waiting` are kept as they are; `again`
    are in batches that are issued again; `restarted` were in flight and get a new attempt; `pending` wait for an
    attempt; `ended` were evicted, filtered, cancelled or poison. `over_bound` of `again` are over the staleness bound
    at the step their batch would be trained at: that batch is taken apart, and they are run again or evicted.

    `checkpoint` None: from the start. `checkpoint_is_foreign`: it holds steps that the ledger does not know. `recorded`
    is the newest checkpoint that the ledger knows of. `untrainable` says which batch would end the learner again, and
    why; it is empty when none would. `epoch` is the learner incarnation that opens."""

    run: str
    checkpoint: str | None
    checkpoint_is_foreign: bool
    recorded: str | None
    untrainable: str
    epoch: int
    steps_kept: int
    steps_undone: int
    trained: int
    sealed: int
    waiting: int
    again: int
    over_bound: int
    restarted: int
    pending: int
    ended: int
    lost: int
    batches: tuple[str, ...]
    deciles: tuple[DurationDecile, ...]
    problems: tuple[str, ...]

    @property
    def kept(self) -> int:
        """Rollouts with a result that stays."""
        return self.trained + self.sealed + self.waiting + self.again

    def to_json(self) -> dict[str, Any]:
        return {"kept": self.kept, **asdict(self)}

    def lines(self) -> list[str]:
        """For a person."""
        origin = f"checkpoint {self.checkpoint}" if self.checkpoint else "the start"
        steps = f"{self.steps_kept} steps kept, {self.steps_undone} undone"
        kept = f"{self.trained} trained, {self.sealed} sealed, {self.waiting} waiting, {self.again} to be trained again"
        first = f", {self.batches[0]} first" if self.batches else ""
        bound = f", {self.over_bound} rollouts over the bound by then" if self.over_bound else ""
        return [
            f"resume from {origin} as epoch {self.epoch}: {steps}",
            f"kept {self.kept} rollouts ({kept})",
            f"issued again: {len(self.batches)} batches, the same in the same order{first}{bound}",
            f"restarted {self.restarted} rollouts in flight, as new attempts; {self.pending} wait for an attempt",
            f"lost {self.lost}" + (f": {self.problems[0]}" if self.problems else ""),
            *self._decile_lines(),
        ]

    def _decile_lines(self) -> list[str]:
        if not self.deciles:
            return []
        rows = (
            ("duration up to", [_seconds(decile.upper_s) for decile in self.deciles]),
            ("kept", [str(decile.kept) for decile in self.deciles]),
            ("of them again", [str(decile.again) for decile in self.deciles]),
            ("restarted", [str(decile.restarted) for decile in self.deciles]),
        )
        return [f"{name:>14}  " + " ".join(f"{cell:>7}" for cell in cells) for name, cells in rows]


def resume_report(run_dir: Path, *, max_staleness: int, batch_tries: int = 2) -> ResumeReport:
    """Read a run that nobody drives. Raises LedgerRefused when it holds no readable ledger."""
    evidence = read_open(run_dir)
    return _Plan(evidence, audit(evidence), max_staleness, batch_tries).report()


class _Plan:
    """What `open_epoch` at the newest checkpoint makes of the evidence."""

    def __init__(self, evidence: Evidence, checked: VerifyReport, max_staleness: int, batch_tries: int) -> None:
        self.evidence, self.checked, self.max_staleness = evidence, checked, max_staleness
        self.batch_tries = batch_tries
        self.attempts = {attempt.key: attempt for attempt in evidence.attempts}
        self.checkpoint = max(evidence.witnesses, key=lambda witness: witness.version, default=None)
        self.path = evidence.surviving
        self.known = _steps_up_to(self.checkpoint, self.path)
        self.undone = self.path[self.known or 0 :]
        self.batches = self._batches_again()
        self.again = {member.rollout_id for batch in self.batches for member in batch.members}

    def report(self) -> ResumeReport:
        states = Counter(rollout.state for rollout in self.evidence.rollouts if rollout.rollout_id not in self.again)
        closed = self.evidence.closed
        states.update(closed.rollouts if closed else {})
        ahead: tuple[str, ...] = ()
        if self.known is None and self.checkpoint is not None:
            ahead = (f"checkpoint {self.checkpoint.version} holds steps that the ledger does not know",)
        named = {RolloutState.TRAINED, RolloutState.SEALED, RolloutState.WAITING, *_UNDONE}
        return ResumeReport(
            run=str(self.evidence.run_dir),
            checkpoint=str(self.checkpoint.version) if self.checkpoint else None,
            checkpoint_is_foreign=bool(ahead),
            recorded=self._recorded(),
            untrainable=self._untrainable(),
            epoch=self._epoch,
            steps_kept=(closed.steps if closed else 0)
            + sum(not commit.skipped for commit in self.path[: len(self.path) - len(self.undone)]),
            steps_undone=sum(not commit.skipped for commit in self.undone),
            trained=states[RolloutState.TRAINED],
            sealed=states[RolloutState.SEALED],
            waiting=states[RolloutState.WAITING],
            again=len(self.again),
            over_bound=self._over_bound(),
            restarted=states[RolloutState.IN_FLIGHT],
            pending=states[RolloutState.PENDING],
            ended=sum(count for state, count in states.items() if state not in named),
            lost=self.checked.lost + len(ahead),
            batches=tuple(batch.batch_id for batch in self.batches),
            deciles=self._deciles(),
            problems=(*ahead, *self.checked.problems),
        )

    def _untrainable(self) -> str:
        batch = next((batch for batch in self.batches if batch.tries >= self.batch_tries), None)
        if batch is None:
            return ""
        members = ((member.rollout_id, member.attempt) for member in batch.members)
        return untrainable(batch, {key[0]: self.attempts[key] for key in members})

    def _recorded(self) -> str | None:
        chains = {commit.chain for commit in self.path}
        known = [record.version for record in self.evidence.checkpoints if record.chain in chains]
        return str(max(known)) if known else None

    @property
    def _epoch(self) -> int:
        return max((epoch.epoch for epoch in self.evidence.epochs), default=0) + 1

    def _batches_again(self) -> list[BatchRecord]:
        """In the order in which they are issued again."""
        by_id = {batch.batch_id: batch for batch in self.evidence.batches}
        undone = [by_id[commit.batch_id] for commit in self.undone if commit.batch_id in by_id]
        leased = [batch for batch in self.evidence.batches if batch.state is BatchState.LEASED]
        queued = [batch for batch in self.evidence.batches if batch.state is BatchState.QUEUED]
        leased.sort(key=lambda batch: (batch.epoch, batch.version.step))
        return [*undone, *leased, *sorted(queued, key=lambda batch: batch.queue_order or 0)]

    def _over_bound(self) -> int:
        """Rollouts of `batches` whose staleness is over the bound when their batch's turn comes, after those before it
        that are not taken apart."""
        if not self.evidence.epochs:
            return 0
        tree, undone = self.evidence.tree(), UndoneSteps()
        parent = self.checkpoint.version if self.checkpoint else PolicyVersion(1, 0)
        tree.open_epoch(self._epoch, parent)
        kept = {commit.sequence for commit in self.path[: self.known or 0]}
        for commit in self.evidence.commits:
            if commit.sequence not in kept:
                undone.add(commit)
        total, version = 0, PolicyVersion(self._epoch, parent.step)
        chain = self.checkpoint.chain if self.checkpoint else ""
        for batch in self.batches:
            over = self._members_over(batch, version, tree)
            total += over
            if not over:
                after = undone.predict(tree, version, chain, [batch])
                version, tree, chain = after.version, after.tree, extend_chain(chain, digest_of(batch))
        return total

    def _members_over(self, batch: BatchRecord, trained_at: PolicyVersion, tree: VersionTree) -> int:
        # Of an archive that is lost nothing is known.
        keys = ((member.rollout_id, member.attempt) for member in batch.members)
        attempts = [self.attempts[key] for key in keys if key in self.attempts]
        stalest = [
            max((tree.staleness(trained_at, part.version) for part in attempt.trained), default=0)
            for attempt in attempts
        ]
        return sum(staleness > self.max_staleness for staleness in stalest)

    def _deciles(self) -> tuple[DurationDecile, ...]:
        finished = {rollout_id: _duration_s(attempt) for rollout_id, attempt in self._last_results().items()}
        if not finished:
            return ()
        edges = decile_edges(finished.values())
        newest_s = max(one.ended_at_s or one.issued_at_s for one in self.evidence.attempts)
        restarted = [
            max(0.0, newest_s - self.attempts[rollout.rollout_id, rollout.attempt].issued_at_s)
            for rollout in self.evidence.rollouts
            if rollout.state is RolloutState.IN_FLIGHT
        ]
        kept = Counter(bisect_left(edges, seconds) for seconds in finished.values())
        again = Counter(bisect_left(edges, finished[key]) for key in self.again if key in finished)
        begun = Counter(bisect_left(edges, seconds) for seconds in restarted)
        return tuple(
            DurationDecile(
                upper_s=edges[index] if index < len(edges) else None,
                kept=kept[index],
                again=again[index],
                restarted=begun[index],
            )
            for index in range(len(edges) + 1)
        )

    def _last_results(self) -> dict[RolloutId, AttemptRecord]:
        """By rollout with a result that stays, the attempt it is of."""
        return {
            rollout.rollout_id: attempt
            for rollout in self.evidence.rollouts
            if rollout.state in _WITH_RESULT
            and (attempt := self.attempts.get((rollout.rollout_id, rollout.attempt))) is not None
        }


_UNDONE = frozenset({RolloutState.LEASED, RolloutState.IN_FLIGHT, RolloutState.PENDING})
_WITH_RESULT = frozenset({RolloutState.TRAINED, RolloutState.LEASED, RolloutState.SEALED, RolloutState.WAITING})


def _steps_up_to(checkpoint: Witness | None, path: Sequence[CommitRecord]) -> int | None:
    """How many steps of the path the checkpoint holds; None when it is not on the path."""
    if checkpoint is None or not checkpoint.chain:
        return 0
    chains = [commit.chain for commit in path]
    return chains.index(checkpoint.chain) + 1 if checkpoint.chain in chains else None


def _duration_s(attempt: AttemptRecord) -> float:
    """The time of its phases; where those are unknown, from issue to end."""
    seconds = sum(seconds for _, seconds in attempt.phases_s)
    return seconds or max(0.0, (attempt.ended_at_s or attempt.issued_at_s) - attempt.issued_at_s)


def decile_edges(durations_s: Iterable[float]) -> list[float]:
    """The upper edges of all deciles but the last, which has none; equal ones are one."""
    ordered = sorted(durations_s)
    edges = {ordered[ceil(len(ordered) * part / DECILES) - 1] for part in range(1, DECILES)}
    return sorted(edges - {ordered[-1]})


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "more"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} m"
