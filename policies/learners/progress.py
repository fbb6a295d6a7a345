"""Progress of one learner incarnation: version, hash chain, and batches since the last checkpoint; and the metrics of a
batch that do not depend on the learner. Needs no torch.

Invariants:
- Every batch, including a skipped one, is added in order to the hash chain and to the next checkpoint's manifest.
- A skipped step keeps the version; `max_skipped_in_a_row` of them in a row end the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.buffer.trajectories.types import Batch, BatchItem, CheckpointRef
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import CheckpointUnreadable, NonFiniteRun
from headrace.policies.learner import LearnerState
from headrace.policies.learners import checkpoints


class LearnerProgress:
    """Progress since a checkpoint, or since the start of the run."""

    def __init__(self, resume: CheckpointRef | None, *, epoch: int, max_skipped_in_a_row: int) -> None:
        """Raise CheckpointUnreadable if the checkpoint's manifest is another one, or of this or a later epoch."""
        if resume is not None:
            found = checkpoints.read_checkpoint(Path(resume.path))
            if (found.version, found.chain) != (resume.version, resume.chain):
                raise CheckpointUnreadable(
                    f"{resume.path} contains version {found.version}, but {resume.version} was requested"
                )
            if epoch <= resume.version.epoch:
                raise CheckpointUnreadable(
                    f"{resume.path} has epoch {resume.version.epoch}: resume it in a later epoch"
                )
        self._parent = resume.version if resume else None
        self._chain = self._saved_chain = resume.chain if resume else ""
        self._since_save: list[checkpoints.SteppedBatch] = []
        self._skipped_in_a_row, self._max_skipped_in_a_row = 0, max_skipped_in_a_row
        self.version = PolicyVersion(epoch, resume.version.step if resume else 0)

    @property
    def state(self) -> LearnerState:
        return LearnerState(parent=self._parent, step=self.version.step, chain=self._chain)

    @property
    def has_unsaved(self) -> bool:
        """Whether batches have been added since the last checkpoint."""
        return bool(self._since_save)

    def stepped(self, batch: Batch, *, skipped: bool) -> PolicyVersion:
        """Record one batch, and return the version after it."""
        members = tuple((item.rollout_id, item.attempt) for item in batch.items)
        stepped = checkpoints.SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=skipped)
        self._since_save.append(stepped)
        self._chain = checkpoints.fold_chain(self._chain, [stepped])
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if not skipped:
            self.version = PolicyVersion(self.version.epoch, self.version.step + 1)
        return self.version

    def stop_when_diverged(self) -> None:
        """Raise NonFiniteRun after the last allowed skipped step."""
        limit = self._max_skipped_in_a_row
        if self._skipped_in_a_row >= limit:
            raise NonFiniteRun(
                f"the gradients of the last {limit} steps were not finite at version {self.version}: resume from an "
                "earlier checkpoint with a lower learner.learning_rate, or raise learner.max_skipped_in_a_row"
            )

    def manifest(
        self, *, trained: Mapping[str, str | int], configuration: Mapping[str, Any] | None
    ) -> checkpoints.Manifest:
        """Return the manifest of a checkpoint at this version; see `Manifest`."""
        return checkpoints.Manifest(
            version=self.version,
            previous_chain=self._saved_chain,
            chain=self._chain,
            batches=tuple(self._since_save),
            trained=trained,
            configuration=configuration or {},
        )

    def saved(self) -> None:
        """Record that a checkpoint with `manifest` is complete."""
        self._saved_chain = self._chain
        self._since_save = []


def trained_tokens(item: BatchItem) -> int:
    """Return the number of trained tokens in all rows of a trajectory."""
    return sum(int(row.loss_mask_T.sum()) for row in item.trajectory.rows)


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of a step that follow from its batch alone."""
    staleness = [item.staleness for item in batch.items]
    return {
        "tokens": float(sum(trained_tokens(item) for item in batch.items)),
        "mean_staleness": sum(staleness) / len(staleness),
        "max_staleness": float(max(staleness)),
        "mean_reward": sum(item.reward for item in batch.items) / len(batch.items),
    }
