"""Synchronous part of the Megatron learner, called from one thread: reports, snapshots and checkpoints of what its
ranks compute. Needs no torch.

Invariants:
- Weights, moments and version change only at the end of a step whose gradient is finite; an earlier failure does not
  change them.
- A batch is trained once: repeating the step with the last batch (because a cancelled call lost its result) returns the
  same report.
- The ranks are compared before each checkpoint: without their agreement none is written.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.buffer.trajectories.row_limits import RowLimits
from headrace.buffer.trajectories.types import Batch, CheckpointRef, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import RowUnusable
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.learners import checkpoints
from headrace.policies.learners.checkpoint_retention import remove_old
from headrace.policies.learners.config import LearnerConfig, trained_as
from headrace.policies.learners.progress import LearnerProgress, batch_metrics
from headrace.policies.learners.ranks.contract import Ranks, StartRanks, whole_step
from headrace.policies.models.qwen_config import QwenConfig

KEPT_SNAPSHOTS = 2
"""Number of snapshots to keep: the one being sent and the one just written."""
MODEL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model")
WEIGHTS_INDEX = "model.safetensors.index.json"


class MegatronTrainer:
    """Ranks, version and hash chain of one learner incarnation. Create it with `open_trainer`."""

    def __init__(
        self, config: LearnerConfig, resume: CheckpointRef | None, progress: LearnerProgress, start: StartRanks
    ) -> None:
        """Start the ranks. Raises as they do, and ModelInvalid."""
        self._config = config
        self.progress = progress
        self._source = Path(resume.path) if resume else config.model_dir
        shape = QwenConfig.read(self._source / "config.json")
        self._limits = RowLimits(vocabulary=shape.vocab_size, tokens=config.token_budget)
        self._last_report: StepReport | None = None
        self._last_snapshot: WeightsSnapshot | None = None
        self._ranks: Ranks = start(config, resume)

    def step(self, batch: Batch) -> StepReport:
        """Perform one update. Raises RowUnusable before any change, NonFiniteRun after the last allowed skip."""
        if self._last_report is not None and self._last_report.batch_id == batch.lease.batch_id:
            self.progress.stop_when_diverged()
            return self._last_report
        started = time.perf_counter()
        refused = {item.rollout_id: why for item in batch.items if (why := self._limits.violation(item.trajectory))}
        if refused:
            rollout_id, why = next(iter(refused.items()))
            raise RowUnusable(f"{len(refused)} of {len(batch.items)} rollouts, first {rollout_id}: {why}", refused)
        # Constant after a linear warm-up over the first `warmup_steps` updates of the run.
        warm = (self.progress.version.step + 1) / self._config.warmup_steps if self._config.warmup_steps else 1.0
        learning_rate = self._config.learning_rate * min(1.0, warm)
        done = whole_step(self._ranks.step(batch, learning_rate))
        skipped = not math.isfinite(done.grad_norm)
        version = self.progress.stepped(batch, skipped=skipped)
        observing = {}
        if done.observed is not None:
            coefficient = self._config.observation_coef_at(batch.version.step)
            unmarked = sum(row.kinds_T is None for item in batch.items for row in item.trajectory.rows)
            observing = done.observed.metrics(coefficient=coefficient, total=done.loss) | {
                "unmarked_rows": float(unmarked)
            }
        metrics = {
            # Those of the objective are means over the trained tokens of computed rows; none if no row is computed.
            **done.sums.means(),
            **batch_metrics(batch),
            **done.drift.shares(),
            **observing,
            **done.critic,
            "computed_tokens": float(done.sums.tokens),
            "loss": done.loss,
            "grad_norm": done.grad_norm,
            "learning_rate": learning_rate,
            "seconds": time.perf_counter() - started,
        }
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._last_report = StepReport(
            batch_id=batch.lease.batch_id,
            version=version,
            skipped=skipped,
            metrics=finite,
            drift=done.drift.drift(),
        )
        self.progress.stop_when_diverged()
        return self._last_report

    def snapshot(self) -> WeightsSnapshot:
        """Write the weights for the sender, and remove the file of the snapshot before last."""
        version = self.progress.version
        if self._last_snapshot is not None and self._last_snapshot.version == version:
            return self._last_snapshot
        directory = self._config.snapshot_dir
        directory.mkdir(parents=True, exist_ok=True)
        final = directory / f"{version}.safetensors"
        staged = final.with_suffix(".tmp")
        for leftover in directory.glob("*.tmp"):
            # Of a learner that was killed, or whose disk was full: it is as large as the model.
            leftover.unlink(missing_ok=True)
        self._ranks.export(staged, version)
        staged.rename(final)
        # By version: the sender may still read a file of the previous incarnation, and modification times are wrong
        # after the clock was set back.
        oldest_first = sorted(directory.glob("*.safetensors"), key=lambda path: PolicyVersion.parse(path.stem))
        for path in oldest_first[:-KEPT_SNAPSHOTS]:
            path.unlink()
        self._last_snapshot = WeightsSnapshot(version=version, shards=(WeightsShard.of(final),))
        return self._last_snapshot

    def save(self, configuration: Mapping[str, Any] | None = None) -> CheckpointRef:
        """Write the checkpoint of the current version, unless it already exists because only skipped steps have
        followed it. Raises OSError, after removing what it had written."""
        root, version = self._config.checkpoint_dir, self.progress.version
        if (root / str(version)).exists():
            return checkpoints.read_checkpoint(root / str(version))
        self._ranks.check_agreement()
        staged = checkpoints.stage(root, version)
        try:
            self._write_checkpoint(staged, configuration)
            final = checkpoints.publish(staged, version)
        except OSError:
            # On a full disk it would take the space that the ledger needs.
            shutil.rmtree(staged, ignore_errors=True)
            raise
        # The checkpoint from which the run resumed may be removed.
        self._source = final
        self.progress.saved()
        remove_old(root, newest=self._config.keep_checkpoints)
        return checkpoints.read_checkpoint(final)

    def interrupt(self) -> None:
        """Make a waiting call fail, from any thread."""
        self._ranks.interrupt()

    def close(self) -> None:
        """End the ranks; the trainer is unusable afterwards."""
        self._ranks.close()

    def _write_checkpoint(self, staged: Path, configuration: Mapping[str, Any] | None) -> None:
        trained = checkpoints.trained_model(self._source) | {checkpoints.OBJECTIVE: self._config.objective}
        for file in sorted(self._source.iterdir()):
            if file.suffix in MODEL_FILE_SUFFIXES and file.name not in (checkpoints.MANIFEST, WEIGHTS_INDEX):
                shutil.copyfile(file, staged / file.name)
        # transformers loads in the dtype of config.json, and the exported weights have the learner's.
        keys = json.loads((staged / "config.json").read_text(encoding="utf-8")) | {"dtype": self._config.dtype}
        (staged / "config.json").write_text(json.dumps(keys, indent=2), encoding="utf-8")
        self._ranks.export(staged / "model.safetensors", self.progress.version)
        (staged / checkpoints.MEGATRON_STATE).mkdir()
        self._ranks.save_state(staged / checkpoints.MEGATRON_STATE)
        checkpoints.write_manifest(staged, self.progress.manifest(trained=trained, configuration=configuration))


def open_trainer(
    config: LearnerConfig, resume: CheckpointRef | None, epoch: int, *, start: StartRanks | None = None
) -> MegatronTrainer:
    """Load the model or the checkpoint into the ranks that `start` returns, by default into one in this process. If
    that fails, the ranks have ended."""
    progress = LearnerProgress(resume, epoch=epoch, max_skipped_in_a_row=config.max_skipped_in_a_row)
    if resume is not None:
        checkpoints.refuse_mismatch(Path(resume.path), trained_as(config))
    if start is None:
        from headrace.policies.learners.ranks.rank import SoleRank

        start = SoleRank
    return MegatronTrainer(config, resume, progress, start)
