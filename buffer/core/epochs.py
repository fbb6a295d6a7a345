"""Epochs: learner incarnations, each opened at a checkpoint with the later steps undone.

Invariants:
- Only the newest epoch may take, commit and save.
- Opening an epoch puts the batches of undone steps, and those that the previous learner left behind, back into the
  queue.
- A checkpoint is accepted only if its hash chain and version are those of a step on the surviving path.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from headrace.buffer.core.batch_queue import BatchQueue
from headrace.buffer.core.records import CheckpointRecord, EpochRecord
from headrace.buffer.core.state import ReplayState
from headrace.buffer.errors import CheckpointLate, CheckpointMissing, LedgerBehind, LedgerMismatch, StaleEpoch
from headrace.buffer.trajectories.sanitizer import plain_checkpoint
from headrace.buffer.trajectories.types import CheckpointRef, RolloutId
from headrace.buffer.trajectories.versions import PolicyVersion

EPOCHS_RESERVED: Final = "epochs_reserved"
"""Counter of a ledger that was restored from a copy: epochs up to this number may have been opened after the copy."""


def finished_late(version: PolicyVersion, epochs: Iterable[EpochRecord], *, reserved: int) -> bool:
    """Return whether the checkpoint of a version that is not on the surviving path was finished by a learner that had
    been replaced: the epoch after its own would have been opened at it if it had existed then. Epochs up to `reserved`
    were those of a lost ledger."""
    later = min((one for one in epochs if one.epoch > version.epoch), key=lambda one: one.epoch, default=None)
    if later is None:
        return version.epoch <= reserved
    return version > (later.parent or PolicyVersion(1, 0))


class Epochs:
    """Opens epochs, records checkpoints, and fences off older learners."""

    def __init__(self, state: ReplayState, queue: BatchQueue) -> None:
        self._state, self.queue = state, queue

    def fence(self, epoch: int) -> None:
        """Raise StaleEpoch unless `epoch` is the current one."""
        if epoch != self._state.path.epoch or epoch < 1:
            raise StaleEpoch(f"epoch {epoch} is not the current one ({self._state.path.epoch}): this learner must end")

    def head(self) -> PolicyVersion:
        """Return the version that the next step starts from. Raises StaleEpoch before the first epoch."""
        head = self._state.path.head
        if head is None:
            raise StaleEpoch("no learner incarnation is open: call open_epoch first")
        return head

    def open(self, checkpoint: CheckpointRef | None, now: float, *, from_start: bool = False) -> PolicyVersion:
        """Open an epoch at `checkpoint` (None: from the start), and undo the steps after it. If a checkpoint has been
        recorded, None is accepted only with `from_start`. Raises LedgerMismatch, LedgerBehind, CheckpointLate,
        CheckpointMissing, in which case nothing is changed.
        """
        checkpoint = checkpoint and plain_checkpoint(checkpoint)
        if checkpoint is None and not from_start:
            self.refuse_without_checkpoint()
        sequence = self._sequence_of(checkpoint) if checkpoint else 0
        if self.needs_history(checkpoint):
            raise LedgerMismatch("this undoes steps on forgotten batches: recall them from the ledger's archive first")
        path = self._state.path
        epoch = max(path.epoch, self._state.counters[EPOCHS_RESERVED]) + 1
        undone = [commit for number, commit in sorted(path.commits.items()) if number > sequence]
        again = [path.batches[commit.batch_id] for commit in undone] + self.queue.left_behind()
        for commit in undone:
            self._state.put(replace(commit, rolled_back_by=epoch))
        if undone:
            self._state.count("batches_rolled_back", len(undone))
        self.queue.requeue(again)
        if checkpoint and checkpoint.version not in path.checkpoints:
            self._record(checkpoint, sequence, now)
        parent = checkpoint.version if checkpoint else (PolicyVersion(1, 0) if epoch > 1 else None)
        chain = checkpoint.chain if checkpoint else ""
        self._state.put(EpochRecord(epoch=epoch, parent=parent, chain=chain, opened_at_s=now, follows=parent))
        return self.head()

    def checkpointed(self, ref: CheckpointRef, now: float) -> None:
        """Record a durable checkpoint directory; idempotent. Raises StaleEpoch, LedgerMismatch."""
        ref = plain_checkpoint(ref)
        known = self._state.path.checkpoints.get(ref.version)
        if known is not None and known.chain == ref.chain:
            return
        self.fence(ref.version.epoch)
        self._record(ref, self._sequence_of(ref), now)

    def refuse_without_checkpoint(self) -> None:
        """Raise CheckpointMissing when the surviving path has a recorded checkpoint."""
        chains = {commit.chain for commit in self._state.path.commits.values()}
        recorded = [record.version for record in self._state.path.checkpoints.values() if record.chain in chains]
        if recorded:
            raise CheckpointMissing(
                f"the ledger recorded checkpoint {max(recorded)}, but the learner has none: put the run's checkpoints "
                "back, or train all steps again with `headrace resume --from-start`"
            )

    def needs_history(self, checkpoint: CheckpointRef | None) -> bool:
        """Return whether opening at `checkpoint` undoes steps that have been forgotten or whose batches have been
        forgotten; these must first be recalled from the ledger's archive."""
        chain = checkpoint.chain if checkpoint else ""
        commits = list(self._state.path.commits.values())
        places = [place for place, commit in enumerate(commits) if commit.chain == chain]
        if not places and (chain or self._state.path.steps_closed):
            return self._state.path.steps_closed > 0
        undone = commits[places[0] + 1 :] if places else commits
        return any(commit.batch_id not in self._state.path.batches for commit in undone)

    def trained_after(self, checkpoint: CheckpointRef | None) -> set[RolloutId]:
        """Return the rollouts of the steps that opening at `checkpoint` undoes, as far as their batches are known.
        Raises LedgerMismatch, LedgerBehind."""
        sequence = self._sequence_of(checkpoint) if checkpoint else 0
        path = self._state.path
        undone = (commit.batch_id for number, commit in path.commits.items() if number > sequence)
        batches = (path.batches[batch_id] for batch_id in undone if batch_id in path.batches)
        return {member.rollout_id for batch in batches for member in batch.members}

    def _record(self, ref: CheckpointRef, sequence: int, now: float) -> None:
        self._state.put(
            CheckpointRecord(
                version=ref.version, path=ref.path, batch_ids=ref.batch_ids, chain=ref.chain, recorded_at_s=now
            )
        )
        self._state.close_covered(sequence)

    def _sequence_of(self, checkpoint: CheckpointRef) -> int:
        """Return the last step that `checkpoint` covers; 0 if it covers none. Raises LedgerBehind, CheckpointLate,
        LedgerMismatch."""
        path = self._state.path
        covered = [number for number, commit in path.commits.items() if commit.chain == checkpoint.chain]
        sequence = covered[0] if covered else 0
        reserved = self._state.counters[EPOCHS_RESERVED]
        is_late = finished_late(checkpoint.version, path.epochs.values(), reserved=reserved)
        late = CheckpointLate(
            f"checkpoint {checkpoint.path} was finished after another learner had taken over: it is set aside, and the "
            "run continues from the one before"
        )
        if checkpoint.chain and not covered:
            if is_late:
                raise late
            known = [commit.batch_id for commit in path.commits.values()]
            # Batches older than those known here are in the ledger's archive.
            oldest = known[0] if known and path.steps_closed else ""
            missing = [
                batch_id
                for batch_id in checkpoint.batch_ids
                if batch_id not in known and (len(batch_id), batch_id) >= (len(oldest), oldest)
            ]
            if missing:
                raise LedgerBehind(
                    f"checkpoint {checkpoint.path} holds batches that the ledger has not committed ({missing[0]}...): "
                    "restore the ledger that belongs to it, or remove the checkpoint to resume from an earlier one"
                )
            raise LedgerMismatch(
                f"checkpoint {checkpoint.path} was trained on other batches than the ledger's surviving path: it is "
                "from another run or an undone line; move it elsewhere to resume from the one before"
            )
        # The weights after a step have a name in each epoch that opened there.
        commit = path.commits.get(sequence)
        names = {commit.version if commit else PolicyVersion(1, 0)}
        for record in path.epochs.values():
            if record.parent in names and record.chain == (commit.chain if commit else ""):
                names.add(PolicyVersion(record.epoch, record.parent.step))
        if checkpoint.version not in names:
            if is_late:
                raise late
            raise LedgerMismatch(
                f"checkpoint {checkpoint.path} has version {checkpoint.version}, but the ledger has another there: "
                "it is from a path that was rolled back; use another checkpoint"
            )
        return sequence
