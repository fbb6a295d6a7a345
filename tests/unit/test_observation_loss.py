"""The term of observations: a coefficient of 0 leaves no trace, schedules, metrics and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from headrace.actors.errors import ConfigError
from headrace.actors.run.config import load_recipe
from headrace.buffer.trajectories.types import Batch
from headrace.policies.learners.micro_batches import collate, weighted_rows
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.observation import observation_loss
from headrace.policies.learners.objectives.token_sums import ObservationSums
from support.objective_cases import make_batch, make_row, objective_of

RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
KINDS = [0, 1, 4, 4, 1, 2, 2, 3, 4]
MASK = [kind == 4 for kind in KINDS]


def batch() -> Batch:
    tokens = list(range(9))
    return make_batch([(1.0, [make_row(tokens, MASK, kinds=KINDS)]), (0.0, [make_row(tokens, MASK)])])


def collated(**keys: Any) -> Any:
    config = ObjectiveConfig(**keys)
    return collate(weighted_rows(batch(), objective_of(config), config), torch.device("cpu"))


def test_weights_have_their_own_denominators() -> None:
    assert collated(observation_coef=0.1).observed.weights_M.tolist() == pytest.approx([1 / (2 * 3.001)] * 2 + [0.0])
    full = collated(observation_coef=0.1, observation_target="full", observation_mean="token")
    assert full.observed.weights_M.tolist() == pytest.approx([1 / 3.001] * 3)
    assert full.observed.warnings_M.tolist() == [False, False, True]
    trained = collated(observation_coef=0.1).weights_N
    assert torch.equal(trained[:3], collated().weights_N)


@pytest.mark.parametrize(
    "keys",
    [
        {"observation_coef": 0.0},
        {"observation_coef": 0.0, "observation_target": "full", "observation_mean": "token"},
    ],
)
def test_without_a_coefficient_a_batch_is_the_same(keys: dict[str, Any]) -> None:
    plain, found = collated(), collated(**keys)
    assert found.observed is None
    assert found.scored_BT is found.trained_BT
    assert found.temperatures_S is found.temperatures_N
    for name in ("tokens_BT", "trained_BT", "advantages_N", "temperatures_N", "weights_N"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


def test_rows_without_advantage_are_computed_only_for_their_observations() -> None:
    assert len(collated().tokens_BT) == 1
    assert len(collated(observation_coef=0.1).tokens_BT) == 2


def test_no_selected_token_gives_zero_with_a_gradient_of_zeros() -> None:
    logprobs_S = torch.randn(4, requires_grad=True)
    none = torch.zeros(4, dtype=torch.bool)
    loss, sums = observation_loss(logprobs_S[none], torch.zeros(0), none[:0])
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert torch.equal(logprobs_S.grad, torch.zeros(4))
    assert sums == ObservationSums()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [0.4, 0.4, 0.4, 0.4]),
        ({"observation_schedule": "linear_decay", "observation_decay_steps": 4}, [0.4, 0.2, 0.0, 0.0]),
        ({"observation_schedule": "step_decay", "observation_decay_steps": 2}, [0.4, 0.2, 0.1, 0.05]),
    ],
)
def test_the_coefficient_follows_its_schedule(keys: dict[str, Any], expected: list[float]) -> None:
    config = ObjectiveConfig(observation_coef=0.4, **keys)
    assert [config.observation_coef_at(step) for step in (0, 2, 4, 6)] == pytest.approx(expected)


def test_metrics_compare_the_term_with_the_rest_of_the_loss() -> None:
    sums = ObservationSums(loss=2.0, selected=3, observations=3, warnings=1, observation_sum=6.0, warning_sum=4.0)
    found = (sums + ObservationSums(loss=1.0, selected=1, observations=1, observation_sum=2.0)).metrics(
        coefficient=0.1, total=-0.3
    )
    assert found == pytest.approx(
        {
            "observation_coef": 0.1,
            "observation_loss": 3.0,
            "observation_loss_scaled": 0.3,
            "observation_to_policy": 0.5,
            "observation_tokens": 4.0,
            "observation_cross_entropy": 2.0,
            "warning_cross_entropy": 4.0,
        }
    )


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ({"observation_schedule": "linear_decay"}, "needs learner.observation_decay_steps"),
        ({"observation_decay_steps": 5}, "has no effect with observation_schedule constant"),
    ],
)
def test_a_schedule_and_its_steps_go_together(keys: dict[str, Any], part: str) -> None:
    with pytest.raises(ValidationError, match=part):
        ObjectiveConfig(observation_coef=0.1, **keys)


@pytest.mark.parametrize(
    ("recipe", "overrides", "part"),
    [
        ("quickstart", ["learner.kind=external"], "no effect with learner.kind external"),
        ("quickstart", ["buffer.zero_variance=filter"], "set buffer.zero_variance to keep"),
    ],
)
def test_recipes_that_cannot_train_observations_are_refused(recipe: str, overrides: list[str], part: str) -> None:
    load_recipe(RECIPES / "quickstart.toml", ["learner.observation_coef=0.05"], Path("run"))
    with pytest.raises(ConfigError) as refusal:
        load_recipe(RECIPES / f"{recipe}.toml", [*overrides, "learner.observation_coef=0.05"], Path("run"))
    assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)
