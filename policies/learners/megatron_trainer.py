"""Synchronous part of the Megatron learner; it uses torch and is called from one thread.

Invariants:
- Weights, moments and version change only at the end of a step whose gradient is finite; an earlier failure does not
  change them.
- A batch is trained once: repeating the step with the last batch (because a cancelled call lost its result) returns the
  same report.
"""

from __future__ import annotations

import json
import math
import shutil
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from headrace.buffer.packing import pack
from headrace.buffer.row_limits import RowLimits
from headrace.buffer.types import Batch, CheckpointRef, StepReport
from headrace.buffer.versions import PolicyVersion
from headrace.policies.errors import RowUnusable
from headrace.policies.learner import WeightsShard, WeightsSnapshot
from headrace.policies.learners import checkpoints, megatron_checkpoint, megatron_model, megatron_world
from headrace.policies.learners.checkpoint_retention import remove_old
from headrace.policies.learners.config import trained_as
from headrace.policies.learners.logprob_drift import DriftMeter
from headrace.policies.learners.megatron_optimizer import MainOptimizer
from headrace.policies.learners.micro_batches import WeightedRow, collate, trained_tokens, weighted_rows
from headrace.policies.learners.objectives.loss import TokenSums, weighted_loss
from headrace.policies.learners.objectives.registry import OBJECTIVES
from headrace.policies.learners.progress import LearnerProgress
from headrace.policies.learners.reference_model import ReferenceModel
from headrace.policies.models.qwen_config import QwenConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

if TYPE_CHECKING:
    from headrace.policies.learners.config import LearnerConfig

KEPT_SNAPSHOTS = 2
"""Number of snapshots to keep: the one being sent and the one just written."""
MODEL_FILE_SUFFIXES = (".json", ".jinja", ".txt", ".model")
WEIGHTS_INDEX = "model.safetensors.index.json"


class MegatronTrainer:
    """Model, optimizer, version and hash chain of one learner incarnation. Create it with `open_trainer`."""

    def __init__(self, config: LearnerConfig, resume: CheckpointRef | None, progress: LearnerProgress) -> None:
        self._config = config
        self.progress = progress
        self._objective = OBJECTIVES.find(config.objective)()
        self._source = Path(resume.path) if resume else config.model_dir
        self._device = megatron_world.start(config.seed, config.device, threads=config.threads)
        self._shape = QwenConfig.read(self._source / "config.json")
        self._limits = RowLimits(vocabulary=self._shape.vocab_size, tokens=config.token_budget)
        settings = megatron_model.transformer_config(self._shape, getattr(torch, config.dtype))
        model = megatron_model.build_model(self._shape, settings, recompute=config.recompute)
        self._model = model.to(self._device)
        self._ddp = DistributedDataParallel(
            settings, DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False), self._model
        )
        self._optimizer = MainOptimizer(self._model, config)
        self._last_report: StepReport | None = None
        self._last_snapshot: WeightsSnapshot | None = None
        if resume:
            megatron_checkpoint.load_state(self._source / checkpoints.MEGATRON_STATE, self._model, self._optimizer)
        else:
            self._optimizer.assign(megatron_model.read_weights(self._source, self._shape))
        self._reference = (
            ReferenceModel(config.model_dir, self._shape, settings, device=self._device) if config.kl_coef > 0 else None
        )

    def step(self, batch: Batch) -> StepReport:
        """Perform one update. Raises RowUnusable before any change, NonFiniteRun after the last
        allowed skip."""
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
        meter = DriftMeter(batch, cap=self._config.weight_cap)
        loss, sums = self._accumulate(weighted_rows(batch, self._objective, self._config), meter)
        grad_norm = self._optimizer.take_gradients(max_norm=self._config.clip_grad_norm)
        skipped = not math.isfinite(grad_norm)
        if not skipped:
            self._optimizer.step(learning_rate)
        self._optimizer.drop_gradients()
        version = self.progress.stepped(batch, skipped=skipped)
        metrics = _metrics(batch, sums) | meter.shares()
        metrics |= {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": learning_rate,
            "seconds": time.perf_counter() - started,
        }
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._last_report = StepReport(
            batch_id=batch.lease.batch_id,
            version=version,
            skipped=skipped,
            metrics=finite,
            drift=meter.drift(),
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
        self._export(staged)
        staged.rename(final)
        # By version: the sender may still read a file of the previous incarnation, and modification times are wrong
        # after the clock was set back.
        oldest_first = sorted(directory.glob("*.safetensors"), key=lambda path: PolicyVersion.parse(path.stem))
        for path in oldest_first[:-KEPT_SNAPSHOTS]:
            path.unlink()
        self._last_snapshot = WeightsSnapshot(version=version, shards=(WeightsShard.of(final),))
        return self._last_snapshot

    def save(self) -> CheckpointRef:
        """Write the checkpoint of the current version, unless it already exists because only skipped steps have
        followed it. Raises OSError, after removing what it had written."""
        root, version = self._config.checkpoint_dir, self.progress.version
        if (root / str(version)).exists():
            return checkpoints.read_checkpoint(root / str(version))
        staged = checkpoints.stage(root, version)
        try:
            self._write_checkpoint(staged)
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

    def close(self) -> None:
        """Destroy the process group; the trainer is unusable afterwards."""
        megatron_world.stop()

    def _write_checkpoint(self, staged: Path) -> None:
        trained = checkpoints.trained_model(self._source) | {checkpoints.OBJECTIVE: self._config.objective}
        for file in sorted(self._source.iterdir()):
            if file.suffix in MODEL_FILE_SUFFIXES and file.name not in (checkpoints.MANIFEST, WEIGHTS_INDEX):
                shutil.copyfile(file, staged / file.name)
        # transformers loads in the dtype of config.json, and the exported weights have the learner's.
        keys = json.loads((staged / "config.json").read_text(encoding="utf-8")) | {"dtype": self._config.dtype}
        (staged / "config.json").write_text(json.dumps(keys, indent=2), encoding="utf-8")
        self._export(staged / "model.safetensors")
        (staged / checkpoints.MEGATRON_STATE).mkdir()
        megatron_checkpoint.save_state(staged / checkpoints.MEGATRON_STATE, self._model, self._optimizer)
        checkpoints.write_manifest(staged, self.progress.manifest(trained=trained))

    def _accumulate(self, rows: list[WeightedRow], meter: DriftMeter) -> tuple[float, TokenSums]:
        """Accumulate the gradient of all rows in Megatron's buffers, and their log-probabilities in `meter`. Return the
        loss and its sums over trained tokens."""
        self._ddp.zero_grad_buffer()
        lengths = [len(row.row.tokens_T) for row in rows]
        total, sums = 0.0, TokenSums()
        for indices in pack(lengths, token_budget=self._config.token_budget):
            micro = collate([rows[index] for index in indices], self._device)
            reference_N = self._reference.logprobs_N(micro) if self._reference is not None else None
            logprobs_N, entropies_N = self._ddp(micro.tokens_BT, micro.trained_BT, micro.temperatures_N)
            tokens = micro.trained_tokens(logprobs_N, entropies_N, reference_N)
            loss, part = weighted_loss(tokens, micro.weights_N, self._objective, self._config)
            loss.backward()  # type: ignore[no-untyped-call]
            computed = [rows[index].row for index in indices]
            meter.add(computed, logprobs_N.detach().float().cpu().numpy(), positions=micro.tokens_BT.numel())
            total, sums = total + float(loss.detach()), sums + part
        self._ddp.finish_grad_sync()
        return total, sums

    def _export(self, path: Path) -> None:
        weights = megatron_model.export_weights(self._model, self._shape)
        try:
            save_file(weights, path, metadata={"format": "pt", "version": str(self.progress.version)})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error


def open_trainer(config: LearnerConfig, resume: CheckpointRef | None, epoch: int) -> MegatronTrainer:
    """Start the world and load the model or the checkpoint. If that fails, stop the world again."""
    progress = LearnerProgress(resume, epoch=epoch, max_skipped_in_a_row=config.max_skipped_in_a_row)
    if resume is not None:
        checkpoints.refuse_mismatch(Path(resume.path), trained_as(config))
    try:
        return MegatronTrainer(config, resume, progress)
    except BaseException:
        megatron_world.stop()
        raise


def _metrics(batch: Batch, sums: TokenSums) -> dict[str, float]:
    """Return the metrics of a step. Those of the objective are means over the trained tokens of computed rows (none if
    no row is computed); `tokens` counts all trained tokens."""
    staleness = [item.staleness for item in batch.items]
    return {
        **sums.means(),
        "tokens": float(sum(trained_tokens(item) for item in batch.items)),
        "computed_tokens": float(sums.tokens),
        "mean_staleness": sum(staleness) / len(staleness),
        "max_staleness": float(max(staleness)),
        "mean_reward": sum(item.reward for item in batch.items) / len(batch.items),
    }
