"""AdamW whose step count stands in the parameter group, so that torch_dist checkpoints can hold its state.

Megatron's distributed optimizer saves and loads one step per group, as Transformer Engine's and Apex's FusedAdam keep
it. torch's AdamW keeps one per parameter, which torch_dist cannot save. Where one of the fused optimizers is installed,
as in slime's image, Megatron uses that, and this one is not used.
"""

from __future__ import annotations

from typing import Any

import torch


class GroupStepAdam(torch.optim.Optimizer):
    """AdamW with decoupled weight decay (arXiv 1711.05101), as torch's: same update, same numbers.

    Not a subclass of torch.optim.AdamW, which refuses a state without a step per parameter when it is loaded.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
    ) -> None:
        """Raise ValueError for `adam_w_mode` False, L2 regularisation instead of weight decay."""
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay is supported: remove the flag that turns it off")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initialize_state(self, parameter: torch.Tensor, *_: object) -> None:
        """Create the moments of one parameter, as Megatron asks before it loads a checkpoint."""
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        self.state[parameter].update(moments)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        if closure is not None:
            raise ValueError("a closure is not supported")
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            (beta1, beta2), rate = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                mean, square = (self.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))
                parameter.mul_(1 - rate * group["weight_decay"])
                mean.lerp_(parameter.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                # In the order of torch.optim.AdamW, so that the rounding is the same too.
                scale = (square.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
                parameter.addcdiv_(mean, scale, value=-rate / (1 - beta1**step))


def use() -> None:
    """Make Megatron use GroupStepAdam unless a fused optimizer is installed, for models that are built after it."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.distrib_optimizer as distributed

    if distributed.HAVE_APEX_OR_TE:
        return
    optimizer.Adam = distributed.Adam = GroupStepAdam
    # Megatron's own switches: which optimizer it constructs, and where it looks for the step.
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distributed.HAVE_APEX_OR_TE = distributed.USING_TE_OPTIMIZER = True
