"""Off-policy corrections that multiply the loss of a token. All use current / behaviour, and have no gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.tokens import TrainedTokens

if TYPE_CHECKING:
    from torch import Tensor


def correction_weights(tokens: TrainedTokens, config: ObjectiveConfig) -> Tensor | None:
    """Return the factor of each token's policy loss, of shape N; None if all are 1.

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
