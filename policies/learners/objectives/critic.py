"""Configuration of a critic, and the advantages of tokens that follow from its values. Needs no torch.

Invariants:
- A row is the sequence: the last trained token of each row has the reward of the trajectory, all others have 0.
- Only trained tokens are states of the sequence: observations between them neither discount nor have values.

Shapes: N trained tokens of a row.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from headrace.buffer.primitives.sections import Section


class CriticSection(Section):
    """Section [learner.critic] of a recipe: the model that predicts rewards for the objective `ppo`."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """AdamW's learning rate of the critic, constant. Its other settings are those of the policy."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of the reward for each trained token."""
    gae_lambda: float = Field(default=1.0, ge=0, le=1)
    """Weight of later values in an advantage: with 1, it is the discounted reward minus the value."""
    value_clip: float = Field(default=0.2, gt=0)
    """The loss is the larger one of the value's and that of the value moved by at most this since the batch arrived. It
    acts from the second update on a batch on."""
    updates: int = Field(default=1, ge=1)
    """Number of updates of the critic on each batch."""
    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps at the start of a run in which only the critic is trained. They are steps of the run, with
    versions of their own, whose weights are the start model's."""


def token_advantages(
    values_N: npt.NDArray[np.float64], reward: float, section: CriticSection
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the generalised advantage estimates (arXiv 1506.02438, equation 16) and returns of the trained tokens of a
    row, given the values before each of them."""
    advantages_N = np.empty_like(values_N)
    following_value = following_advantage = 0.0
    rewards_N = np.zeros_like(values_N)
    rewards_N[-1] = reward
    for at in range(len(values_N) - 1, -1, -1):
        surprise = rewards_N[at] + section.gamma * following_value - values_N[at]
        following_advantage = surprise + section.gamma * section.gae_lambda * following_advantage
        advantages_N[at], following_value = following_advantage, values_N[at]
    return advantages_N, advantages_N + values_N


def explained_variance(values_N: npt.NDArray[np.float64], returns_N: npt.NDArray[np.float64]) -> float:
    """Return 1 - var(return - value) / var(return): 1 for a perfect critic, 0 for one that predicts a constant. NaN if
    all returns are equal."""
    variance = float(returns_N.var())
    return 1.0 - float((returns_N - values_N).var()) / variance if variance else float("nan")
