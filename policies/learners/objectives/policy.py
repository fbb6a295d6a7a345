"""headrace's own policy losses. Each has the gradient -c A grad log p for a token, and differs in the coefficient c.

With r = current / behaviour of a token, s = the geometric mean of r over the trained tokens of its row, C = weight_cap
if `correction` is `cap`, `icepop` or `tis` (otherwise infinite), and A the advantage of the token's trajectory:

    grpo   c = min(r, C) where the clip is not passed, otherwise 0; with `icepop` and `tis` there is no clip
    ppo    the same, with A of the token instead of its trajectory
    gspo   c = min(s, C) where the clip is not passed, otherwise 0
    cispo  c = min(clip(r, 1 - eps_low, 1 + eps_high), C)

The clip is passed where A > 0 and the ratio > 1 + eps_high, or A < 0 and the ratio < 1 - eps_low, or, with `dual_clip`,
A < 0 and the ratio > dual_clip. Coefficients have no gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from headrace.policies.learners.objectives.config import UNCLIPPED, ObjectiveConfig
from headrace.policies.learners.objectives.tokens import TokenLoss, TrainedTokens

if TYPE_CHECKING:
    from torch import Tensor


def grpo(tokens: TrainedTokens, config: ObjectiveConfig) -> TokenLoss:
    """Return GRPO's loss (arXiv 2402.03300, equation 3), PPO's max(-r A, -clip(r, 1 - eps_low, 1 + eps_high) A) (arXiv
    1707.06347), with DAPO's separate upper bound (arXiv 2503.14476) and the dual clip of arXiv 1912.09729.

    The loss of a token that passed the clip is 0 instead of PPO's constant, which has the same gradient. IcePop (arXiv
    2510.18855) bounds the ratio to the sampling weights by a mask; a clip of that ratio would lie inside it. `tis` is
    the policy gradient with truncated importance weights."""
    return _clipped(tokens, tokens.log_ratios_N().exp(), config, clips=config.correction not in UNCLIPPED)


def ppo(tokens: TrainedTokens, config: ObjectiveConfig) -> TokenLoss:
    """Return PPO's loss (arXiv 1707.06347, equation 7): that of `grpo`, with an advantage for each token."""
    return grpo(tokens, config)


def gspo(tokens: TrainedTokens, config: ObjectiveConfig) -> TokenLoss:
    """Return GSPO's loss (arXiv 2507.18071, equations 5 and 7). A sequence is a row.

    It has the form of GSPO-token (equations 13 and 14), which has the same gradient because all tokens of a row have
    the same weight and advantage. With a mask of single tokens, those have no gradient, and the others keep theirs."""
    return _clipped(tokens, tokens.row_means_N(tokens.log_ratios_N()).exp(), config)


def cispo(tokens: TrainedTokens, config: ObjectiveConfig) -> TokenLoss:
    """Return CISPO's loss (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). Clipped tokens keep their gradient."""
    ratio_N = tokens.log_ratios_N().exp()
    clipped_N = ratio_N.clamp(1.0 - config.eps_low, 1.0 + config.eps_high)
    coefficient_N = _capped(clipped_N, config) * tokens.advantages_N
    return TokenLoss(loss_N=-coefficient_N * tokens.logprobs_N, metrics={"clip_fraction": clipped_N != ratio_N})


def _clipped(tokens: TrainedTokens, ratio_N: Tensor, config: ObjectiveConfig, *, clips: bool = True) -> TokenLoss:
    low, high = (1.0 - config.eps_low, 1.0 + config.eps_high) if clips else (0.0, math.inf)
    passed_N = ((tokens.advantages_N > 0) & (ratio_N > high)) | ((tokens.advantages_N < 0) & (ratio_N < low))
    if config.dual_clip is not None:
        passed_N |= (tokens.advantages_N < 0) & (ratio_N > config.dual_clip)
    coefficient_N = (_capped(ratio_N, config) * tokens.advantages_N).masked_fill(passed_N, 0.0)
    # The last factor is 1, with the gradient of the log-probability.
    loss_N = -coefficient_N * (tokens.logprobs_N - tokens.logprobs_N.detach()).exp()
    return TokenLoss(loss_N=loss_N, metrics={"clip_fraction": passed_N})


def _capped(ratio_N: Tensor, config: ObjectiveConfig) -> Tensor:
    # icepop masks the tokens above the cap; an infinite ratio times 0 would not be 0.
    return ratio_N.clamp(max=config.weight_cap) if config.correction in ("cap", *UNCLIPPED) else ratio_N
