"""AdamW over the fp32 main weights of a Megatron model.

Invariants:
- Main weights are the model's own parameters if those are at least fp32. Otherwise they are fp32 copies, and after
  every change each parameter of the model is its main weight, rounded.
- Gradients are those that Megatron's DDP summed in at least fp32 (`main_grad`).
- Only matrices decay: norms and biases keep their scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from headrace.policies.learners.config import LearnerConfig


class MainOptimizer:
    """Main weights of a model, by the names of its parameters, with their optimizer."""

    def __init__(self, model: torch.nn.Module, config: LearnerConfig) -> None:
        self._parameters: dict[str, Any] = dict(model.named_parameters())
        self.weights: dict[str, torch.nn.Parameter] = {
            name: parameter
            if parameter.dtype.itemsize >= torch.float32.itemsize
            else torch.nn.Parameter(torch.empty_like(parameter, dtype=torch.float32))
            for name, parameter in self._parameters.items()
        }
        matrices = [weight for weight in self.weights.values() if weight.ndim > 1]
        vectors = [weight for weight in self.weights.values() if weight.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
        )

    def assign(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set all main weights, and with them the model's parameters."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                weight.copy_(weights[name])
        self._round()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the main weights and the optimizer's state of each, with their names."""
        for name, weight in self.weights.items():
            yield name, weight
            for key, value in sorted(self.adamw.state.get(weight, {}).items()):
                yield f"{name} {key}", value

    def take_gradients(self, *, max_norm: float) -> float:
        """Take the gradients from Megatron's buffers, scale them down to `max_norm`, and return their norm before
        that."""
        for name, parameter in self._parameters.items():
            self.weights[name].grad = parameter.main_grad
        return float(torch.nn.utils.clip_grad_norm_(self.weights.values(), max_norm))

    def step(self, learning_rate: float) -> None:
        """Update the weights with the gradients that were taken."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self._round()

    def drop_gradients(self) -> None:
        """Release the gradients. Megatron's hooks add a parameter's `grad` to its buffer, so it must be empty before
        the next backward pass."""
        self.adamw.zero_grad(set_to_none=True)

    def _round(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not self.weights[name]:
                    parameter.copy_(self.weights[name])
