"""Objectives: their values and gradients are those of independent code in float64, and today's default is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.policies.learners.micro_batches import collate, weighted_rows
from headrace.policies.learners.objectives.config import ObjectiveConfig
from headrace.policies.learners.objectives.loss import Objective, kl_estimate, trajectory_weights, weighted_loss
from headrace.policies.learners.objectives.tokens import TrainedTokens
from support.objective_cases import SETTINGS, logprobs_of, make_batch, make_row, objective_of, random_tokens, reinforce

VOCABULARY = 11
STEP = 1e-30
"""Step of the derivatives by complex numbers, which are exact to rounding (Squire and Trapp, 1998)."""


def tokens_of(ratios: Sequence[float], advantages: Sequence[float], rows: Sequence[int] | None = None) -> TrainedTokens:
    """Tokens with log-probability -1 and these ratios current / behaviour, each in a row of its own unless given."""
    count = len(ratios)
    return TrainedTokens(
        logprobs_N=torch.full((count,), -1.0, requires_grad=True),
        entropies_N=torch.zeros(count, requires_grad=True),
        behaviour_logprobs_N=torch.tensor([-1.0 - math.log(ratio) for ratio in ratios]),
        reference_logprobs_N=None,
        advantages_N=torch.tensor(advantages),
        rows_N=torch.tensor(rows if rows is not None else range(count)),
        trajectories_N=torch.arange(count),
    )


def gradient(tokens: TrainedTokens, **settings: Any) -> list[float]:
    """d loss / d log-probability of each token, with weights of 1."""
    config = ObjectiveConfig(**settings)
    loss, _ = weighted_loss(tokens, torch.ones(len(tokens.rows_N)), objective_of(config), config)
    loss.backward()
    assert tokens.logprobs_N.grad is not None
    return tokens.logprobs_N.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 1.0, -1.0),
        (1.0, -2.0, 2.0),
        (1.27, 1.0, -1.27),
        (0.5, 1.0, -0.5),
        (0.81, -1.0, 0.81),
        (1.9, -1.0, 1.9),
        (7.0, -1.0, 2.0),
    ],
)
def test_the_gradient_is_minus_capped_ratio_times_advantage(ratio: float, advantage: float, expected: float) -> None:
    assert gradient(tokens_of([ratio], [advantage])) == pytest.approx([expected], rel=1e-5)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.29, 1.0), (50.0, 0.1), (0.79, -1.0), (0.01, -3.0)])
def test_the_gradient_is_zero_beyond_the_clip_in_the_advantages_direction(ratio: float, advantage: float) -> None:
    assert gradient(tokens_of([ratio, 1.0], [advantage, advantage]))[0] == 0.0
    assert gradient(tokens_of([ratio, 1.0], [advantage, advantage]), eps_low=1.0, eps_high=100.0)[0] != 0.0


def test_stale_behaviour_logprobs_clip_the_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = (0.5 * torch.randn(200, generator=generator)).exp().tolist()
    advantages = torch.randn(200, generator=generator).sign().tolist()
    unclipped = {"eps_low": 1.0, "eps_high": 1e9}
    norms = [torch.tensor(gradient(tokens_of(ratios, advantages), **clip)).norm() for clip in ({}, unclipped)]
    assert 0.0 < norms[0] < 0.95 * norms[1]
    fresh = [1.0] * 200
    assert gradient(tokens_of(fresh, advantages)) == gradient(tokens_of(fresh, advantages), **unclipped)


def test_gspo_clips_whole_rows() -> None:
    """The first row has the mean ratio 1.5, the second 1.0, although the ratios of its tokens are above and below."""
    tokens = tokens_of([1.5, 1.5, 1.5, 1 / 1.5], [1.0] * 4, rows=[0, 0, 1, 1])
    assert gradient(tokens, objective="gspo") == pytest.approx([0.0, 0.0, -1.0, -1.0])


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    tokens = tokens_of([3.0, 0.1, 1.1], [1.0, -1.0, 1.0])
    assert gradient(tokens, objective="cispo") == pytest.approx([-1.28, 0.8, -1.1])


def test_an_infinite_ratio_is_masked_and_capped() -> None:
    for settings, expected in (({}, 2.0), ({"correction": "icepop"}, 0.0)):
        tokens = tokens_of([1.0, 1.0], [-1.0, -1.0])
        tokens.behaviour_logprobs_N[0] = -1000.0
        assert gradient(tokens, **settings) == [expected, 1.0]


def test_a_non_finite_advantage_reaches_the_gradient() -> None:
    assert math.isnan(gradient(tokens_of([1.0, 1.0], [math.nan, 1.0]))[0])


def test_metrics_are_means_over_trained_tokens() -> None:
    tokens, config = tokens_of([1.0, 2.0, 0.5], [1.0, 1.0, 1.0]), ObjectiveConfig()
    with torch.no_grad():
        tokens.entropies_N.copy_(torch.tensor([0.5, 1.0, 1.5]))
    loss, sums = weighted_loss(tokens, torch.full((3,), 1 / 3), objective_of(config), config)
    assert float(loss.detach()) == pytest.approx(-(1.0 + 0.0 + 0.5) / 3)
    both = (sums + sums).means()
    assert both == pytest.approx(
        {"entropy": 1.0, "clip_fraction": 1 / 3, "mean_ratio": 3.5 / 3, "mean_abs_log_ratio": 2 * math.log(2.0) / 3}
    )
    assert (sums + sums).tokens == 6


def loss_before(
    tokens: TrainedTokens, weights_N: torch.Tensor, *, eps_low: float = 0.2, eps_high: float = 0.28, cap: float = 2.0
) -> torch.Tensor:
    """GRPO's loss as it was when it was the only one."""
    ratio_N = (tokens.logprobs_N.detach() - tokens.behaviour_logprobs_N).exp()
    passed_N = ((tokens.advantages_N > 0) & (ratio_N > 1.0 + eps_high)) | (
        (tokens.advantages_N < 0) & (ratio_N < 1.0 - eps_low)
    )
    scale_N = torch.where(passed_N, 0.0, ratio_N.clamp(max=cap) * tokens.advantages_N * weights_N)
    return -(scale_N * (tokens.logprobs_N - tokens.logprobs_N.detach()).exp()).sum()


@pytest.mark.parametrize("seed", range(5))
def test_the_default_is_bit_identical_to_the_only_loss_of_before(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ratios = (0.6 * torch.randn(3000, generator=generator)).exp().tolist()
    advantages = torch.randn(3000, generator=generator).tolist()
    weights_N = torch.rand(3000, generator=generator) / 64
    before, now = tokens_of(ratios, advantages), tokens_of(ratios, advantages)
    expected = loss_before(before, weights_N)
    expected.backward()
    loss, _ = weighted_loss(now, weights_N, objective_of(ObjectiveConfig()), ObjectiveConfig())
    loss.backward()
    assert float(loss.detach()) == float(expected.detach())
    assert now.logprobs_N.grad is not None
    assert before.logprobs_N.grad is not None
    assert torch.equal(now.logprobs_N.grad, before.logprobs_N.grad)
    assert now.entropies_N.grad is None, "nothing flows back through entropies"


class PaperLoss:
    """The loss of a batch, token by token in plain complex numbers. Only `current` carries the derivative; everything
    under a stop-gradient uses its real part."""

    def __init__(self, tokens: TrainedTokens, config: ObjectiveConfig) -> None:
        arrays = ("behaviour_logprobs_N", "reference_logprobs_N", "advantages_N", "rows_N", "trajectories_N")
        self.behaviour, self.reference, self.advantages, self.rows, self.trajectories = (
            getattr(tokens, name).numpy() for name in arrays
        )
        self.config = config
        self.count = len(self.rows)

    def weight(self, at: int) -> float:
        kind = self.config.loss_weight
        if kind == "token":
            return 1 / self.count
        batch = len(set(self.trajectories.tolist()))
        if kind == "constant":
            return 1 / (batch * 12.5)
        return 1 / (batch * sum(other == self.trajectories[at] for other in self.trajectories))

    def row_mean(self, values: np.ndarray, at: int) -> complex:
        mine = [values[other] for other in range(self.count) if self.rows[other] == self.rows[at]]
        return sum(mine) / len(mine)

    def row_ratio(self, current: np.ndarray, at: int) -> complex:
        """GSPO's ratio; for masked tokens that of GSPO-token, through which only the token itself has a gradient."""
        if self.config.correction == "icepop":
            frozen = np.exp(self.row_mean(current.real - self.behaviour, at).real)
            return complex(frozen * np.exp(current[at] - current[at].real))
        return complex(np.exp(self.row_mean(current - self.behaviour, at)))

    def ppo(self, ratio: complex, advantage: float) -> complex:
        """PPO's clipped objective with the dual clip, to be maximised; the smaller real part decides."""
        config = self.config
        low, high = 1 - config.eps_low, 1 + config.eps_high
        clipped = low if ratio.real < low else high if ratio.real > high else ratio
        value = min(ratio * advantage, clipped * advantage, key=lambda number: complex(number).real)
        if config.dual_clip is not None and advantage < 0:
            value = max(value, config.dual_clip * advantage, key=lambda number: complex(number).real)
        if config.correction == "cap":
            value *= min(ratio.real, config.weight_cap) / ratio.real
        return value

    def policy(self, current: np.ndarray, at: int) -> complex:
        config, advantage = self.config, float(self.advantages[at])
        ratio = np.exp(current[at] - self.behaviour[at])
        if config.correction == "tis":
            value = min(ratio.real, config.weight_cap) * advantage * current[at]
        elif config.objective == "grpo":
            value = ratio * advantage if config.correction == "icepop" else self.ppo(ratio, advantage)
        elif config.objective == "gspo":
            value = self.ppo(self.row_ratio(current, at), advantage)
        elif config.objective == "cispo":
            bounded = max(1 - config.eps_low, min(1 + config.eps_high, ratio.real))
            value = bounded * advantage * current[at]
        else:
            value = advantage * current[at]
        return -value * self.factor(ratio.real, advantage, current, at)

    def factor(self, ratio: float, advantage: float, current: np.ndarray, at: int) -> float:
        config, factor = self.config, 1.0
        if config.correction == "icepop" and not config.weight_floor <= ratio <= config.weight_cap:
            factor = 0.0
        if config.correction == "weights":
            factor = min(ratio, config.weight_cap)
        if config.sequence_mask is not None and advantage < 0:
            divergence = self.row_mean(self.behaviour - current.real, at).real
            factor = 0.0 if divergence > config.sequence_mask else factor
        return factor

    def divergence(self, current: np.ndarray, at: int) -> complex:
        ratio = np.exp(self.reference[at] - current[at])
        kinds = {"k1": -np.log(ratio), "k2": np.log(ratio) ** 2 / 2, "k3": ratio - 1 - np.log(ratio)}
        value = kinds[self.config.kl_kind]
        return 10.0 if self.config.kl_kind == "k3" and value.real > 10 else value

    def total(self, current: np.ndarray, entropies: np.ndarray) -> complex:
        config, total = self.config, 0j
        for at in range(self.count):
            term = self.policy(current, at) - config.entropy_coef * entropies[at]
            if config.kl_coef:
                term += config.kl_coef * self.divergence(current, at)
            total += self.weight(at) * term
        return total

    def gradients(self, logprobs: np.ndarray, entropies: np.ndarray) -> tuple[list[float], list[float]]:
        """d loss / d logprobs and d loss / d entropies."""
        steps = [np.where(np.arange(self.count) == at, 1j * STEP, 0) for at in range(self.count)]
        return (
            [self.total(logprobs + step, entropies).imag / STEP for step in steps],
            [self.total(logprobs, entropies + step).imag / STEP for step in steps],
        )


@pytest.mark.parametrize("name", SETTINGS)
def test_gradients_equal_those_of_the_papers_formulas(name: str) -> None:
    config = ObjectiveConfig(**SETTINGS[name])
    for seed in range(3):
        tokens = random_tokens(seed)
        counts = torch.bincount(tokens.trajectories_N).tolist()
        weights_N = torch.tensor(trajectory_weights(counts, config), dtype=torch.float64)[tokens.trajectories_N]
        loss, _ = weighted_loss(tokens, weights_N, objective_of(config), config)
        loss.backward()
        logprobs, entropies = tokens.logprobs_N.detach().numpy(), tokens.entropies_N.detach().numpy()
        expected, entropy_expected = PaperLoss(tokens, config).gradients(logprobs.astype(complex), entropies)
        assert tokens.logprobs_N.grad is not None
        np.testing.assert_allclose(tokens.logprobs_N.grad, expected, rtol=1e-9, atol=1e-12)
        if config.entropy_coef:
            np.testing.assert_allclose(tokens.entropies_N.grad, entropy_expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SETTINGS)
def test_values_equal_those_of_the_papers_formulas(name: str) -> None:
    """Without clips, because the loss of a clipped token is 0 here and a constant in the papers."""
    unclipped = {"eps_low": 1.0, "eps_high": 1e9, "dual_clip": None, "correction": "none"}
    config = ObjectiveConfig(**SETTINGS[name] | unclipped)
    tokens = random_tokens(7)
    counts = torch.bincount(tokens.trajectories_N).tolist()
    weights_N = torch.tensor(trajectory_weights(counts, config), dtype=torch.float64)[tokens.trajectories_N]
    loss, _ = weighted_loss(tokens, weights_N, objective_of(config), config)
    logprobs, entropies = tokens.logprobs_N.detach().numpy(), tokens.entropies_N.detach().numpy()
    expected = PaperLoss(tokens, config).total(logprobs + 0j, entropies).real
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-9)


def test_k3_has_no_gradient_beyond_its_bound_and_no_overflow() -> None:
    logprobs = torch.tensor([-200.0, -1.0, -1.0], requires_grad=True)
    kl = kl_estimate(logprobs, torch.tensor([-1.0, -200.0, -1.5]), "k3")
    kl.sum().backward()
    assert kl.tolist() == pytest.approx([10.0, 10.0, math.exp(-0.5) - 0.5])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 1 - math.exp(-0.5)])


def test_terms_without_reference_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        gradient(tokens_of([1.0], [1.0]), kl_coef=0.1)


def test_zero_advantage_rows_are_kept_when_a_term_uses_them() -> None:
    batch = make_batch([(0.0, [make_row([1, 2], [False, True])]), (1.0, [make_row([3, 4], [False, True])])])
    own = objective_of(ObjectiveConfig())
    assert [row.trajectory for row in weighted_rows(batch, own, ObjectiveConfig())] == [1]
    for settings in ({"kl_coef": 0.1}, {"entropy_coef": 0.1}):
        rows = weighted_rows(batch, own, ObjectiveConfig(**settings))
        assert [(row.trajectory, row.weight) for row in rows] == [(0, 0.5), (1, 0.5)]
    foreign = Objective(loss=reinforce)
    assert [row.trajectory for row in weighted_rows(batch, foreign, ObjectiveConfig())] == [0, 1]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [1 / 9, 0.0, 1 / 12]),
        ({"loss_weight": "token"}, [1 / 7, 0.0, 1 / 7]),
        ({"loss_weight": "constant", "loss_constant": 10.0}, [1 / 30, 0.0, 1 / 30]),
    ],
)
def test_weights_of_tokens_are_those_of_the_whole_batch(settings: dict[str, Any], expected: list[float]) -> None:
    """Three trajectories; the second has no trained tokens, and counts among the trajectories."""
    assert trajectory_weights([3, 0, 4], ObjectiveConfig(**settings)) == pytest.approx(expected)


def test_logprobs_match_the_temperature_scaled_softmax() -> None:
    batch = make_batch([(1.0, [make_row([3, 1, 4], [False, False, True])])], temperature=0.5)
    rows = weighted_rows(batch, objective_of(ObjectiveConfig()), ObjectiveConfig())
    logits = torch.randn(1, 3, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logprobs, entropies = logprobs_of(logits, collate(rows, torch.device("cpu")))
    probabilities = torch.softmax(logits[0, 1] / 0.5, dim=-1)
    assert logprobs.tolist() == pytest.approx([float(probabilities[4].log())], rel=1e-5)
    assert entropies.tolist() == pytest.approx([float(torch.special.entr(probabilities).sum())], rel=1e-5)
