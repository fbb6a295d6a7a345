"""Advantages of a critic's values, and the recipes that cannot have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.errors import ConfigError
from headrace.actors.run.config import load_recipe
from headrace.policies.learners.objectives.critic import CriticSection, explained_variance, token_advantages

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
values_strategy = st.lists(st.floats(-3, 3), min_size=1, max_size=12).map(np.array)


@given(values=values_strategy, reward=st.floats(-2, 2))
def test_by_default_an_advantage_is_the_reward_minus_the_value(values: np.ndarray, reward: float) -> None:
    advantages, returns = token_advantages(values, reward, CriticSection())
    assert advantages == pytest.approx(reward - values, abs=1e-9)
    assert returns == pytest.approx(np.full(len(values), reward), abs=1e-9)


@given(values=values_strategy, reward=st.floats(-2, 2), gamma=st.floats(0.1, 1, exclude_min=True), lam=st.floats(0, 1))
def test_advantages_are_the_definitions_sum(values: np.ndarray, reward: float, gamma: float, lam: float) -> None:
    """Equation 16 of arXiv 1506.02438, summed for each token on its own."""
    advantages, returns = token_advantages(values, reward, CriticSection(gamma=gamma, gae_lambda=lam))
    after = [*values[1:], 0.0]
    rewards = [*[0.0] * (len(values) - 1), reward]
    surprises = [r + gamma * v_after - v for r, v_after, v in zip(rewards, after, values, strict=True)]
    for at in range(len(values)):
        expected = sum((gamma * lam) ** (later - at) * surprises[later] for later in range(at, len(values)))
        assert advantages[at] == pytest.approx(expected, abs=1e-9)
        assert returns[at] == pytest.approx(expected + values[at], abs=1e-9)


def test_explained_variance_is_1_for_a_perfect_critic_and_0_for_a_constant_one() -> None:
    returns = np.array([0.0, 1.0, 1.0, 0.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(4, 0.3), returns) == pytest.approx(0.0)
    assert explained_variance(1 - returns, returns) == pytest.approx(-3.0)
    assert np.isnan(explained_variance(returns, np.ones(4)))


@pytest.mark.parametrize(
    ("recipe", "overrides", "part"),
    [
        ("quickstart", ["learner.critic.gamma=0.9"], "learner.critic has no effect with objective grpo"),
        ("quickstart", ["learner.objective=ppo", "learner.ranks=2"], "ranks is 2: set learner.ranks to 1"),
        (
            "claude_code",
            ["learner.kind=slime", "learner.objective=ppo"],
            'learner.objective "ppo", whose critic would take turns',
        ),
        ("quickstart", ["learner.objective=ppo", "learner.correction=weights"], "corrected twice"),
    ],
)
def test_recipes_that_cannot_train_a_critic_are_refused(recipe: str, overrides: list[Any], part: str) -> None:
    load_recipe(RECIPES / "quickstart.toml", ["learner.objective=ppo", "learner.critic.gamma=0.9"], Path("run"))
    with pytest.raises(ConfigError) as refusal:
        load_recipe(RECIPES / f"{recipe}.toml", overrides, Path("run"))
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
