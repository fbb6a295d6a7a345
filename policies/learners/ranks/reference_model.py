"""Frozen copy of the start model, for the KL divergence to it.

Invariants:
- Its weights are those of the run's model directory, after a resume too, in the dtype of the model in training.
- It takes the memory of the model's parameters, without gradients or optimizer state.

Importing this module imports torch and megatron, so only the learner's thread may import it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace.policies.learners import megatron_model
from headrace.policies.learners.micro_batches import MicroBatch
from headrace.policies.models.qwen_config import QwenConfig

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


class ReferenceModel:
    """Frozen copy of the model in a Hugging Face directory. Needs Megatron's model-parallel groups."""

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
