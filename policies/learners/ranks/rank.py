"""One rank of the Megatron learner: model, gradients and optimizer; it uses torch and is called from one thread.

Invariants:
- Weights and moments change only at the end of a step whose gradient is finite; an earlier failure does not change
  them.
- Ranks that took the same steps from the same state have the same weights and moments, bit for bit.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed
from safetensors import SafetensorError
from safetensors.torch import save_file

from headrace.buffer.trajectories.packing import distribute, pack
from headrace.buffer.trajectories.types import Batch, CheckpointRef
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners import checkpoints, megatron_checkpoint, megatron_model, megatron_world
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.logprob_drift import DriftMeter
from headrace.policies.learners.megatron_optimizer import MainOptimizer
from headrace.policies.learners.micro_batches import MicroBatch, WeightedRow, collate, weighted_rows
from headrace.policies.learners.objectives.config import PPO
from headrace.policies.learners.objectives.loss import weighted_loss
from headrace.policies.learners.objectives.observation import observation_loss
from headrace.policies.learners.objectives.registry import OBJECTIVES
from headrace.policies.learners.objectives.token_sums import ObservationSums, TokenSums
from headrace.policies.learners.ranks.contract import RankStep
from headrace.policies.learners.ranks.critic import Critic, critic_metrics
from headrace.policies.models.qwen_config import QwenConfig

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig


class MegatronRank:
    """Model and optimizer of one rank. If its creation fails, the process has left the world again."""

    def __init__(
        self, config: LearnerConfig, resume: CheckpointRef | None, world: megatron_world.World | None = None
    ) -> None:
        """Join `world` (by default as its only rank), and load the model or the checkpoint. Raises DeviceMissing,
        ModelInvalid, CheckpointUnreadable."""
        self._config = config
        self._rank, self._ranks = (world.rank, world.size) if world else (0, 1)
        self._objective = OBJECTIVES.find(config.objective)()
        try:
            self._device = megatron_world.start(config.seed, config.device, threads=config.threads, world=world)
            self._load(resume)
        except BaseException:
            megatron_world.stop()
            raise

    def _load(self, resume: CheckpointRef | None) -> None:
        config, source = self._config, Path(resume.path) if resume else self._config.model_dir
        self._shape = QwenConfig.read(source / "config.json")
        dtype = getattr(torch, config.dtype)
        settings = megatron_model.transformer_config(self._shape, dtype)
        model = megatron_model.build_model(self._shape, settings, recompute=config.recompute)
        self._model = model.to(self._device)
        in_fp32 = dtype.itemsize <= torch.float32.itemsize
        self._ddp = DistributedDataParallel(
            settings, DistributedDataParallelConfig(grad_reduce_in_fp32=in_fp32, overlap_grad_reduce=False), self._model
        )
        self._optimizer = MainOptimizer(self._model, config)
        state = source / checkpoints.MEGATRON_STATE if resume else None
        # Before the policy: a checkpoint's random states are those that the policy's state restores.
        self._critic = (
            Critic(config, self._shape, settings, device=self._device, state=state) if config.objective == PPO else None
        )
        if resume:
            megatron_checkpoint.load_state(source / checkpoints.MEGATRON_STATE, self._model, self._optimizer)
        else:
            self._optimizer.assign(megatron_model.read_weights(source, self._shape))
        self._reference = (
            ReferenceModel(config.model_dir, self._shape, settings, device=self._device) if config.kl_coef > 0 else None
        )

    def step(self, batch: Batch, learning_rate: float) -> RankStep:
        """Compute this rank's rows, sum the gradient with the other ranks, and update the weights if it is finite."""
        meter = DriftMeter(batch, cap=self._config.weight_cap)
        rows = weighted_rows(batch, self._objective, self._config)
        judged = self._critic.judge(rows) if self._critic is not None else []
        rows = [row.row for row in judged] if self._critic is not None else rows
        shares = distribute([len(row.row.tokens_T) for row in rows], ranks=self._ranks)
        coefficient = self._config.observation_coef_at(batch.version.step)
        loss, sums, observed = self._accumulate([rows[index] for index in shares[self._rank]], meter, coefficient)
        grad_norm = self._optimizer.take_gradients(max_norm=self._config.clip_grad_norm)
        learned: dict[str, float] = {}
        if self._critic is not None:
            value_loss, value_norm = self._critic.take_gradients(judged)
            learned = critic_metrics(judged, loss=value_loss, grad_norm=value_norm)
            # A step changes policy and critic, or neither.
            grad_norm = grad_norm if math.isfinite(value_norm) else value_norm
            if math.isfinite(grad_norm):
                self._critic.update(judged)
            self._critic.drop_gradients()
        warming = self._critic is not None and batch.version.step < self._config.critic.warmup_steps
        if math.isfinite(grad_norm) and not warming:
            self._optimizer.step(learning_rate)
        self._optimizer.drop_gradients()
        return RankStep(
            loss=loss,
            grad_norm=grad_norm,
            sums=sums,
            drift=meter.sums,
            observed=observed if coefficient > 0 else None,
            critic=learned,
        )

    def export(self, path: Path, version: PolicyVersion) -> None:
        """Write the weights with Hugging Face names into a safetensors file. Raises OSError."""
        weights = megatron_model.export_weights(self._model, self._shape)
        # safetensors makes its file readable by this user alone, whatever the umask: an engine may have another user.
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(weights, path, metadata={"format": "pt", "version": str(version)})
        except SafetensorError as error:
            raise OSError(f"{path} cannot be written: {error}") from error
        path.chmod(mode)

    def save_state(self, directory: Path) -> None:
        """Write the state together with all other ranks. Raises OSError."""
        megatron_checkpoint.save_state(directory, self._model, self._optimizer)
        if self._critic is not None:
            self._critic.save_state(directory)

    def digest(self) -> str:
        """Return the SHA-256 of the main weights and the optimizer's state, in hexadecimal."""
        found = hashlib.sha256()
        for name, tensor in self._optimizer.tensors():
            found.update(name.encode())
            found.update(tensor.detach().cpu().contiguous().numpy().data)
        return found.hexdigest()

    def close(self) -> None:
        """Leave the world; the rank is unusable afterwards."""
        megatron_world.stop()

    def _accumulate(
        self, rows: list[WeightedRow], meter: DriftMeter, observation_coef: float
    ) -> tuple[float, TokenSums, ObservationSums]:
        """Sum the gradient of the rows and of those of all other ranks in Megatron's buffers, and add their
        log-probabilities to `meter`. Return the loss of the rows and its sums over trained and observed tokens."""
        self._ddp.zero_grad_buffer()
        lengths = [len(row.row.tokens_T) for row in rows]
        total, sums, observed = 0.0, TokenSums(), ObservationSums()
        for indices in pack(lengths, token_budget=self._config.token_budget):
            micro = collate([rows[index] for index in indices], self._device)
            reference_N = self._reference.logprobs_N(micro) if self._reference is not None else None
            logprobs_S, entropies_S = self._ddp(micro.tokens_BT, micro.scored_BT, micro.temperatures_S)
            logprobs_N, entropies_N = micro.of_trained(logprobs_S), micro.of_trained(entropies_S)
            tokens = micro.trained_tokens(logprobs_N, entropies_N, reference_N)
            loss, part = weighted_loss(tokens, micro.weights_N, self._objective, self._config)
            if (extra := micro.observed) is not None:
                term, found = observation_loss(logprobs_S[~extra.trained_S], extra.weights_M, extra.warnings_M)
                loss, observed = loss + observation_coef * term, observed + found
            loss.backward()  # type: ignore[no-untyped-call]
            computed = [rows[index].row for index in indices]
            meter.add(computed, logprobs_N.detach().float().cpu().numpy(), positions=micro.tokens_BT.numel())
            total, sums = total + float(loss.detach()), sums + part
        # Megatron's `finish_grad_sync` averages, and its coalesced all-reduce over gloo has no timeout.
        for buffer in self._ddp.buffers:
            torch.distributed.all_reduce(buffer.grad_data)
        return total, sums, observed


class SoleRank:
    """The only rank of a learner, in this process; see `Ranks`."""

    def __init__(self, config: LearnerConfig, resume: CheckpointRef | None) -> None:
        """See `MegatronRank`."""
        self._rank = MegatronRank(config, resume)
        self.export, self.save_state, self.close = self._rank.export, self._rank.save_state, self._rank.close

    def step(self, batch: Batch, learning_rate: float) -> list[RankStep]:
        """See `Ranks.step`."""
        return [self._rank.step(batch, learning_rate)]

    def check_agreement(self) -> None:
        """Do nothing: there is no other rank."""

    def interrupt(self) -> None:
        """Do nothing: a call ends on its own."""


class ReferenceModel:
    """Frozen copy of the start model, for the KL divergence to it, in the dtype of the model in training. Its weights
    are the run's model directory's, after a resume too. It takes the memory of the model's parameters, without
    gradients or optimizer state. Needs Megatron's model-parallel groups."""

    def __init__(
        self, model_dir: Path, shape: QwenConfig, settings: TransformerConfig, *, device: torch.device
    ) -> None:
        """Load the weights. Raises ModelInvalid when they do not match `shape`."""
        self._model = megatron_model.build_model(shape, settings).requires_grad_(False).eval()
        weights = megatron_model.read_weights(model_dir, shape)
        for name, parameter in self._model.named_parameters():
            parameter.copy_(weights[name])
        self._model.to(device)

    @torch.no_grad()
    def logprobs_N(self, micro: MicroBatch) -> torch.Tensor:
        """Return the log-probabilities of the trained tokens."""
        logprobs_N: torch.Tensor
        logprobs_N, _ = self._model(micro.tokens_BT, micro.trained_BT, micro.temperatures_N)
        return logprobs_N
