"""Supervised training of a miniature's policy on demonstrations, with the embedded engine's forward pass.

Invariants:
- On one machine and torch version, the result depends only on the arguments: one thread, no clock.
- All parameters are one tensor, which AdamW updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.policies.miniatures.demonstrations import Demonstration, Demonstrator

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.policies.models.qwen_config import QwenConfig

PRACTICE_SHARE: Final = 0.7
"""Share of the updates that show mostly good demonstrations."""
GOOD_SHARE: Final = 0.9
"""Share of good demonstrations among those."""

logger = logging.getLogger(__name__)


class FitDiverged(ArithmeticError):
    """The loss of a warm start is not finite."""


class FitConfig(Section):
    """Settings of a warm start."""

    seed: int = 0
    """Random seed of the initial weights."""
    steps: int = Field(default=500, ge=1)
    """Number of updates."""
    batch_size: int = Field(default=64, ge=1)
    """Number of demonstrations in one update."""
    learning_rate: float = Field(default=2e-3, gt=0)
    """AdamW's peak learning rate, held from the end of the warm-up to the halfway point; it then decreases linearly to
    0."""
    warmup_steps: int = Field(default=30, ge=1)
    """Number of updates until the peak learning rate is reached."""


def fit(
    config: FitConfig, model: QwenConfig, demonstrator: Demonstrator, progress: Callable[[int], None] = lambda _: None
) -> Tensor:
    """Train a model from random weights, and return its parameters in the order of `model.shapes()`. `progress` is
    called with the number of updates. Raises FitDiverged if the loss is not finite."""
    import math

    import torch

    from headrace.policies.models.qwen import Qwen, QwenWeights

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(config.seed)
    memory = torch.empty(sum(math.prod(shape) for shape in model.shapes().values())).normal_(
        0, 0.02, generator=generator
    )
    for name, slot in QwenWeights.over(model, memory).slots.items():
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
    memory.requires_grad_()
    optimizer = torch.optim.AdamW([memory], lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = learning_rate_at(config, step)
        # New views every time, so that the gradient reaches the memory through all of them.
        weights = QwenWeights.over(model, memory)
        for index, layer in enumerate(weights.layers):
            layer.spread_norms(weights.slots, index)
        shown = demonstrator.batch(config.batch_size, step=step)
        policy = Qwen(model, weights, capacity=max(len(one.tokens) for one in shown))
        loss = cross_entropy(policy.differentiable_logits([one.tokens[:-1] for one in shown]), shown)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_([memory], 1.0)
        if not torch.isfinite(norm):
            raise FitDiverged(f"the warm start diverged at update {step + 1}; lower its learning rate")
        optimizer.step()
        progress(step + 1)
    logger.info("the warm start ended with loss %.3f", loss.item())
    return memory.detach()


def learning_rate_at(config: FitConfig, step: int) -> float:
    """Return the learning rate at a step; see `FitConfig.learning_rate`."""
    rise = min(1.0, (step + 1) / config.warmup_steps)
    fall = min(1.0, 2 * (config.steps - step) / config.steps)
    return config.learning_rate * rise * fall


def cross_entropy(logits_BTV: Tensor, shown: Sequence[Demonstration]) -> Tensor:
    """Return the mean cross-entropy over the policy's tokens, given the logits before each token but the first."""
    import torch

    width = logits_BTV.shape[1]
    wanted = torch.zeros((len(shown), width), dtype=torch.bool)
    tokens = torch.zeros((len(shown), width), dtype=torch.long)
    for row, one in enumerate(shown):
        length = len(one.tokens) - 1
        tokens[row, :length] = torch.tensor(one.tokens[1:])
        wanted[row, :length] = torch.tensor(one.trained[1:])
    return torch.nn.functional.cross_entropy(logits_BTV[wanted], tokens[wanted])


def save_weights(folder: Path, model: QwenConfig, memory: Tensor) -> None:
    """Write model.safetensors in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from headrace.policies.models.qwen import QwenWeights

    slots = QwenWeights.over(model, memory).slots
    tensors = {name: slot.to(torch.bfloat16).contiguous() for name, slot in sorted(slots.items())}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
