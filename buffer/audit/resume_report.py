"""The report on what a resume will do, derived from the run directory before anything is changed.

Invariants:
- The report only reads (see `evidence`). Batches are reported as `open_epoch` treats them: steps after the newest
  checkpoint are undone, and their batches are issued again, the same ones in the same order; then come the batch that
  was leased and the queued ones. No fresh batch is issued before these.
- Time and memory depend on the open groups, not on the length of the run: closed groups are counted from the
  ledger's totals. Deciles cover open groups only.
- Lost rollouts are those that `ledger verify` finds lost in open groups: rollouts whose state their history does not
  support, and trained work that is not in the ledger. The number of lost rollouts must be 0.
- A rollout's duration is that of its last attempt with a result. For an attempt in flight only a lower bound is known:
  the time until the newest time in the ledger.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

from headrace.buffer.audit.evidence import Evidence, read_open
from headrace.buffer.audit.verify import VerifyReport, audit
from headrace.buffer.core.batch_queue import untrainable
from headrace.buffer.core.epochs import finished_late
from headrace.buffer.core.records import BatchState, RolloutState
from headrace.buffer.core.staleness import StalenessBound
from headrace.buffer.core.training_path import UndoneSteps, digest_of
from headrace.buffer.trajectories.types import extend_chain
from headrace.buffer.trajectories.versions import PolicyVersion

DECILES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationDecile:
    """Number of rollouts of open groups whose attempt took at most `upper_s` (None: no bound) and longer than those in
    the previous decile. The rollouts counted in `again` are also counted in `kept`."""

    upper_s: float | None
    kept: int
    again: int
    restarted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeReport:
    """Number of rollouts by what a resume does with them. `trained` stay trained; `sealed` and `waiting` are kept as
    they are; `again` are in batches that are issued again; `restarted` were in flight and get a new attempt; `pending`
    wait for an attempt; `ended` were evicted, filtered, cancelled or became poison. Of those in `again`, `over_bound`
    will exceed the staleness bound by the step at which their batch would be trained: the batch is dissolved, and they
    are run again or evicted.

    `checkpoint` is None when the run starts from the beginning. `checkpoint_is_foreign` means that it holds steps that
    are not in the ledger; `checkpoint_is_late`, that a replaced learner finished it after a newer epoch had been
    opened. `recorded` is the newest checkpoint in the ledger. `untrainable` names the batch that
    would crash the learner again, with the reason; it is empty when there is none. `epoch` is the learner incarnation
    that will be opened."""

    run: str
    checkpoint: str | None
    checkpoint_is_foreign: bool
    checkpoint_is_late: bool
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
        """Number of rollouts whose result is kept."""
        return self.trained + self.sealed + self.waiting + self.again

    def to_json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        return {"kept": self.kept, **asdict(self)}

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        origin = f"checkpoint {self.checkpoint}" if self.checkpoint else "the start"
        steps = f"{self.steps_kept} steps kept, {self.steps_undone} undone"
        kept = f"{self.trained} trained, {self.sealed} sealed, {self.waiting} waiting, {self.again} to be trained again"
        first = f", {self.batches[0]} first" if self.batches else ""
        bound = f", {self.over_bound} rollouts over the bound by then" if self.over_bound else ""
        uppers = (decile.upper_s for decile in self.deciles)
        rows = (
            ("duration up to", ["more" if upper is None else _duration_text(upper) for upper in uppers]),
            ("kept", [str(decile.kept) for decile in self.deciles]),
            ("of them again", [str(decile.again) for decile in self.deciles]),
            ("restarted", [str(decile.restarted) for decile in self.deciles]),
        )
        return [
            f"resume from {origin} as epoch {self.epoch}: {steps}",
            f"kept {self.kept} rollouts ({kept})",
            f"issued again: {len(self.batches)} batches, the same in the same order{first}{bound}",
            f"restarted {self.restarted} rollouts in flight, as new attempts; {self.pending} wait for an attempt",
            f"lost {self.lost}" + (f": {self.problems[0]}" if self.problems else ""),
            *(f"{name:>14}  " + " ".join(f"{cell:>7}" for cell in cells) for name, cells in rows if cells),
        ]


def resume_report(run_dir: Path, *, max_staleness: int, batch_tries: int = 2) -> ResumeReport:
    """Report on a stopped run. Raises LedgerRefused when it has no readable ledger."""
    evidence = read_open(run_dir)
    return _Plan(evidence, audit(evidence), max_staleness, batch_tries).report()


class _Plan:
    """What `open_epoch` would do at the newest checkpoint, derived from the evidence."""

    def __init__(self, evidence: Evidence, checked: VerifyReport, max_staleness: int, batch_tries: int) -> None:
        self.evidence, self.checked, self.max_staleness = evidence, checked, max_staleness
        self.batch_tries = batch_tries
        self.attempts = {attempt.key: attempt for attempt in evidence.attempts}
        self.checkpoint = max(evidence.witnesses, key=lambda witness: witness.version, default=None)
        self.path = evidence.surviving
        # Number of steps of the path that the checkpoint holds; None when it is not on the path.
        self.known: int | None = 0
        if self.checkpoint is not None and self.checkpoint.chain:
            chains = [commit.chain for commit in self.path]
            self.known = chains.index(self.checkpoint.chain) + 1 if self.checkpoint.chain in chains else None
        self.undone = self.path[self.known or 0 :]
        # In the order in which they are issued again.
        by_id = {batch.batch_id: batch for batch in evidence.batches}
        again = [by_id[commit.batch_id] for commit in self.undone if commit.batch_id in by_id]
        leased = [batch for batch in evidence.batches if batch.state is BatchState.LEASED]
        queued = [batch for batch in evidence.batches if batch.state is BatchState.QUEUED]
        leased.sort(key=lambda batch: (batch.epoch, batch.version.step))
        queued.sort(key=lambda batch: batch.queue_order or 0)
        self.batches = [*again, *leased, *queued]
        self.again = {member.rollout_id for batch in self.batches for member in batch.members}

    def report(self) -> ResumeReport:
        states = Counter(rollout.state for rollout in self.evidence.rollouts if rollout.rollout_id not in self.again)
        closed = self.evidence.closed
        states.update(closed.rollouts if closed else {})
        ahead: tuple[str, ...] = ()
        if self.known is None and self.checkpoint is not None:
            ahead = (f"checkpoint {self.checkpoint.version} contains steps that are not in the ledger",)
        chains = {commit.chain for commit in self.path}
        recorded = [record.version for record in self.evidence.checkpoints if record.chain in chains]
        blocking = ""
        if (batch := next((one for one in self.batches if one.tries >= self.batch_tries), None)) is not None:
            members = ((member.rollout_id, member.attempt) for member in batch.members)
            blocking = untrainable(batch, {key[0]: self.attempts[key] for key in members})
        named = {RolloutState.TRAINED, RolloutState.SEALED, RolloutState.WAITING, *_UNDONE}
        return ResumeReport(
            run=str(self.evidence.run_dir),
            checkpoint=str(self.checkpoint.version) if self.checkpoint else None,
            checkpoint_is_foreign=bool(ahead),
            checkpoint_is_late=self._is_late(),
            recorded=str(max(recorded)) if recorded else None,
            untrainable=blocking,
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

    @property
    def _epoch(self) -> int:
        opened = max((epoch.epoch for epoch in self.evidence.epochs), default=0)
        return max(opened, self.evidence.epochs_reserved) + 1

    def _is_late(self) -> bool:
        found, evidence = self.checkpoint, self.evidence
        if found is None or (found.version, found.chain) in {(one.version, one.chain) for one in evidence.checkpoints}:
            return False
        return finished_late(found.version, evidence.epochs, reserved=evidence.epochs_reserved)

    def _over_bound(self) -> int:
        """Return how many rollouts of `batches` are over the staleness bound when their batch's turn comes, that is,
        after the earlier batches that are not dissolved."""
        if not self.evidence.epochs:
            return 0
        tree, undone = self.evidence.tree(), UndoneSteps()
        parent = self.checkpoint.version if self.checkpoint else PolicyVersion(1, 0)
        if parent.epoch not in tree.forks:
            # Of a newer ledger than this one: the run will not be resumed.
            return 0
        tree.open_epoch(self._epoch, parent)
        kept = {commit.sequence for commit in self.path[: self.known or 0]}
        for commit in self.evidence.commits:
            if commit.sequence not in kept:
                undone.add(commit)
        bound = StalenessBound(self.max_staleness)
        total, version = 0, PolicyVersion(self._epoch, parent.step)
        chain = self.checkpoint.chain if self.checkpoint else ""
        for batch in self.batches:
            # Attempts in a lost archive are unknown.
            keys = ((member.rollout_id, member.attempt) for member in batch.members)
            attempts = [self.attempts[key] for key in keys if key in self.attempts]
            over = sum(
                bool(attempt.trained) and not bound.admits(tree, version, (part.version for part in attempt.trained))
                for attempt in attempts
            )
            total += over
            if not over:
                after = undone.predict(tree, version, chain, [batch])
                version, tree, chain = after.version, after.tree, extend_chain(chain, digest_of(batch))
        return total

    def _deciles(self) -> tuple[DurationDecile, ...]:
        # The time of the phases of the last attempt with a result; where they are unknown, from issue to end.
        finished = {
            rollout.rollout_id: sum(seconds for _, seconds in attempt.phases_s)
            or max(0.0, (attempt.ended_at_s or attempt.issued_at_s) - attempt.issued_at_s)
            for rollout in self.evidence.rollouts
            if rollout.state in _WITH_RESULT
            and (attempt := self.attempts.get((rollout.rollout_id, rollout.attempt))) is not None
        }
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


_UNDONE = frozenset({RolloutState.LEASED, RolloutState.IN_FLIGHT, RolloutState.PENDING})
_WITH_RESULT = frozenset({RolloutState.TRAINED, RolloutState.LEASED, RolloutState.SEALED, RolloutState.WAITING})


def decile_edges(durations_s: Iterable[float]) -> list[float]:
    """Return the upper edges of all deciles except the last, which has none; equal edges are merged."""
    ordered = sorted(durations_s)
    edges = {ordered[ceil(len(ordered) * part / DECILES) - 1] for part in range(1, DECILES)}
    return sorted(edges - {ordered[-1]})


def _duration_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.1f} m"
