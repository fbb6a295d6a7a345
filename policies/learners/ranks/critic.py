"""Critic of the objective `ppo`: a second copy of the model with a scalar value for each position, and its optimizer.

Invariants:
- It begins as the start model with a value head of zeros, so its first values are 0.
- The values of a batch, and with them its advantages, are computed once, before anything is updated.
- Its weights and moments change only with a finite gradient.

Importing this module imports torch and megatron, so only the learner's thread may import it.

Shapes: N trained tokens of a micro-batch in row-major order.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from headrace.buffer.trajectories.packing import pack
from headrace.policies.learners import megatron_checkpoint, megatron_model
from headrace.policies.learners.megatron_optimizer import MainOptimizer
from headrace.policies.learners.micro_batches import collate
from headrace.policies.learners.objectives.critic import explained_variance, token_advantages

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy.typing as npt

from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.micro_batches import MicroBatch, WeightedRow
from headrace.policies.models.qwen_config import QwenConfig

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

FOLDER = "critic"
"""Folder of the critic's state beside that of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JudgedRow:
    """Row with the advantages of its trained tokens, the values before them, and their returns."""

    row: WeightedRow
    values: npt.NDArray[np.float64]
    returns: npt.NDArray[np.float64]


class Critic:
    """Value model of a learner with one rank. Needs Megatron's model-parallel groups."""

    def __init__(
        self,
        config: LearnerConfig,
        shape: QwenConfig,
        settings: TransformerConfig,
        *,
        device: torch.device,
        state: Path | None,
    ) -> None:
        """Load the start model, or the critic in the checkpoint folder `state`. Raises ModelInvalid,
        CheckpointUnreadable."""
        self._config, self._device = config, device
        self._model = megatron_model.build_value_model(shape, settings, recompute=config.recompute).to(device)
        wide = settings.params_dtype.itemsize <= torch.float32.itemsize
        self._ddp = DistributedDataParallel(
            settings, DistributedDataParallelConfig(grad_reduce_in_fp32=wide, overlap_grad_reduce=False), self._model
        )
        self._optimizer = MainOptimizer(self._model, config)
        if state is not None:
            megatron_checkpoint.load_state(state / FOLDER, self._model, self._optimizer)
            return
        head = self._model.value_head.named_parameters("value_head")
        zeros = {name: torch.zeros_like(weight) for name, weight in head}
        self._optimizer.assign(megatron_model.read_weights(config.model_dir, shape) | zeros)

    def judge(self, rows: Sequence[WeightedRow]) -> list[JudgedRow]:
        """Compute the values of all trained tokens, and the advantages and returns that follow from them."""
        judged: list[JudgedRow | None] = [None] * len(rows)
        with torch.no_grad():
            for indices, micro in self._micro_batches(rows):
                values_N = self._ddp(micro.tokens_BT, micro.trained_BT).double().cpu().numpy()
                ends = np.cumsum([int(rows[index].row.loss_mask_T.sum()) for index in indices])
                for index, values in zip(indices, np.split(values_N, ends[:-1]), strict=True):
                    advantages, returns = token_advantages(values, rows[index].reward, self._config.critic)
                    row = replace(rows[index], advantages=advantages.astype(np.float32))
                    judged[index] = JudgedRow(row=row, values=values, returns=returns)
        return [row for row in judged if row is not None]

    def take_gradients(self, judged: Sequence[JudgedRow]) -> tuple[float, float]:
        """Compute the gradient of the clipped value loss, and return the loss and the gradient's norm."""
        self._ddp.zero_grad_buffer()
        total, clip = 0.0, self._config.critic.value_clip
        for indices, micro in self._micro_batches([row.row for row in judged]):
            values_N = self._ddp(micro.tokens_BT, micro.trained_BT)
            old_N, returns_N = (
                torch.from_numpy(np.concatenate([getattr(judged[index], name) for index in indices])).to(values_N)
                for name in ("values", "returns")
            )
            near_N = old_N + (values_N - old_N).clamp(-clip, clip)
            losses_N = torch.maximum((values_N - returns_N).square(), (near_N - returns_N).square()) / 2
            loss = (losses_N * micro.weights_N).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        return total, self._optimizer.take_gradients(max_norm=self._config.clip_grad_norm)

    def update(self, judged: Sequence[JudgedRow]) -> None:
        """Update with the gradient that was taken, and then with further ones up to the number of updates."""
        self._optimizer.step(self._config.critic.learning_rate)
        self._optimizer.drop_gradients()
        for _ in range(1, self._config.critic.updates):
            _, norm = self.take_gradients(judged)
            if math.isfinite(norm):
                self._optimizer.step(self._config.critic.learning_rate)
            self._optimizer.drop_gradients()

    def drop_gradients(self) -> None:
        """Release the gradient without an update."""
        self._optimizer.drop_gradients()

    def save_state(self, directory: Path) -> None:
        """Write weights and optimizer into a folder of `directory`. Raises OSError."""
        (directory / FOLDER).mkdir()
        megatron_checkpoint.save_state(directory / FOLDER, self._model, self._optimizer)

    def _micro_batches(self, rows: Sequence[WeightedRow]) -> Iterator[tuple[list[int], MicroBatch]]:
        lengths = [len(row.row.tokens_T) for row in rows]
        for indices in pack(lengths, token_budget=self._config.token_budget):
            yield list(indices), collate([rows[index] for index in indices], self._device)


def critic_metrics(judged: Sequence[JudgedRow], *, loss: float, grad_norm: float) -> dict[str, float]:
    """Return the metrics of a critic over the trained tokens of a batch; `loss` and `grad_norm` are those of its first
    update."""
    found = {"critic_loss": loss, "critic_grad_norm": grad_norm}
    if judged:
        values_N, returns_N = (np.concatenate([getattr(row, name) for row in judged]) for name in ("values", "returns"))
        found |= {"mean_value": float(values_N.mean()), "mean_return": float(returns_N.mean())}
        found["explained_variance"] = explained_variance(values_N, returns_N)
    return found
