"""Loss of a micro-batch: the policy loss, corrected, and the regularisers, each normalised over the whole batch.

Invariants:
- Every term is a sum over tokens of weight x loss. The weights are fixed for the whole batch before it is divided, from
  the tokens on which a term is defined, so dividing it into micro-batches or ranks changes nothing.
- All terms of this package are defined on all trained tokens of a batch, those without advantage too. A mask sets a
  token's loss to 0 and leaves the denominator as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.token_sums import TokenSums
from headrace.policies.learners.objectives.tokens import TokenLoss, TrainedTokens

if TYPE_CHECKING:
    from torch import Tensor

K3_BOUND = 10.0
_FAR = 20.0
"""Log ratio beyond which k3 exceeds its bound in any case; limited to it, its exponential cannot overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Policy loss, and what the learner has to know of it."""

    loss: Callable[[TrainedTokens, ObjectiveConfig], TokenLoss]
    """Pure function; it neither weights nor sums the losses of the tokens."""
    uses_ratio: bool = True
    """The loss contains current / behaviour, so that `correction = "weights"` is refused."""
    uses_zero_advantage: bool = True
    """A token without advantage may have a gradient. If no term says so, such rows are not computed."""


def trajectory_weights(tokens: Sequence[int], config: ObjectiveConfig) -> list[float]:
    """Return the weight of every token of each trajectory of a batch, given the numbers of their trained tokens.

    `trajectory` divides by the trajectory's tokens and the number of trajectories (GRPO's), `token` by the tokens of
    the batch (DAPO, arXiv 2503.14476), `constant` by loss_constant and the number of trajectories (Dr. GRPO, arXiv
    2503.20783). A trajectory without trained tokens counts among the trajectories, and has weight 0."""
    if config.loss_weight == "token":
        return [1.0 / sum(tokens) if count else 0.0 for count in tokens]
    if config.loss_constant is not None:
        return [1.0 / (len(tokens) * config.loss_constant) if count else 0.0 for count in tokens]
    return [1.0 / (len(tokens) * count) if count else 0.0 for count in tokens]


def weighted_loss(
    tokens: TrainedTokens, weights_N: Tensor, objective: Objective, config: ObjectiveConfig
) -> tuple[Tensor, TokenSums]:
    """Return the loss of a micro-batch, a scalar to be added over the micro-batches of a batch, and its metrics.

    loss = sum of weights x (correction x policy loss + kl_coef x KL - entropy_coef x entropy)."""
    policy = objective.loss(tokens, config)
    log_ratio_N = tokens.log_ratios_N()
    metrics = {
        "entropy": tokens.entropies_N.detach(),
        "mean_ratio": log_ratio_N.exp(),
        "mean_abs_log_ratio": log_ratio_N.abs(),
        **policy.metrics,
    }
    loss_N, correction_N = policy.loss_N, correction_weights(tokens, config)
    if correction_N is not None:
        loss_N = loss_N * correction_N
        metrics["masked_fraction"] = correction_N == 0
    loss = (loss_N * weights_N).sum()
    if config.kl_coef > 0:
        if tokens.reference_logprobs_N is None:
            raise ValueError("kl_coef is above 0, but the tokens have no reference log-probabilities")
        kl_N = kl_estimate(tokens.logprobs_N, tokens.reference_logprobs_N, config.kl_kind)
        loss = loss + config.kl_coef * (kl_N * weights_N).sum()
        metrics["kl"] = kl_N.detach()
    if config.entropy_coef > 0:
        loss = loss - config.entropy_coef * (tokens.entropies_N * weights_N).sum()
    sums = {name: float(values_N.detach().sum()) for name, values_N in metrics.items()}
    return loss, TokenSums(tokens=len(tokens.logprobs_N), sums=sums)


def correction_weights(tokens: TrainedTokens, config: ObjectiveConfig) -> Tensor | None:
    """Return the factor of each token's policy loss, the off-policy correction, of shape N and without gradient; None
    if all are 1.

    `icepop` is 1 where the token's ratio is from weight_floor to weight_cap and 0 elsewhere (arXiv 2510.18855, with the
    ratio itself inside the objective). `weights` is the truncated ratio, TIS. `sequence_mask` is 0 for the tokens of a
    row with a negative advantage and a mean log(behaviour / current) above it (DeepSeek-V3.2, arXiv 2512.02556)."""
    log_ratio_N = tokens.log_ratios_N()
    ratio_N = log_ratio_N.exp()
    weight_N = None
    if config.correction == "icepop":
        weight_N = ((ratio_N >= config.weight_floor) & (ratio_N <= config.weight_cap)).to(ratio_N.dtype)
    elif config.correction == "weights":
        weight_N = ratio_N.clamp(max=config.weight_cap)
    if config.sequence_mask is not None:
        far_N = tokens.row_means_N(-log_ratio_N) > config.sequence_mask
        kept_N = ~(far_N & (tokens.advantages_N < 0))
        weight_N = kept_N * (torch.ones_like(ratio_N) if weight_N is None else weight_N)
    return weight_N


def kl_estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return an estimate of KL(current || reference) for each token, with gradient to `logprobs_N`.

    With d = log(reference / current): k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d
    (http://joschu.net/blog/kl-approx.html), which GRPO uses (arXiv 2402.03300, equation 4). k3 is clamped to 10, beyond
    which it has no gradient. For tokens of the current policy, the mean gradient of k2 is that of the divergence, that
    of k1 is 0, and that of k3 is that of KL(reference || current) (arXiv 2506.09477)."""
    d_N = reference_logprobs_N - logprobs_N
    if kind == "k1":
        return -d_N
    if kind == "k2":
        return d_N.square() / 2
    d_N = d_N.clamp(-_FAR, _FAR)
    return (d_N.expm1() - d_N).clamp(max=K3_BOUND)
