"""PPO on real megatron-core: what the critic predicts, its updates, the warm-up of the policy, and resumes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.buffer.trajectories.types import Batch, BatchId, BatchLease, CheckpointRef
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.megatron_trainer import MegatronTrainer, open_trainer
from headrace.policies.learners.ranks.rank import SoleRank
from support.objective_cases import make_batch, make_row

# Megatron's own call sites rely on the default group it warns about.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")

PROMPT, LENGTH = 5, 14


def batch_of(step: int, *, spoiled: bool = False) -> Batch:
    """Rows whose prompts tell the reward; all have advantage 0, which a critic does not use. One has two rows."""
    chance = np.random.default_rng(3)
    items = []
    for index in range(6):
        rows = []
        for _ in range(2 if index == 5 else 1):
            tokens = [10 + index % 2] * PROMPT + chance.integers(20, 250, size=LENGTH - PROMPT).tolist()
            mask = [at >= PROMPT and at % 4 != 3 for at in range(LENGTH)]
            rows.append(make_row(tokens, mask, [float("nan") if spoiled else -5.5] * LENGTH))
        items.append((0.0, rows))
    batch = make_batch(items)
    rewarded = tuple(replace(item, reward=float(index % 2)) for index, item in enumerate(batch.items))
    lease = BatchLease(batch_id=BatchId(f"b{step}"), epoch=1)
    return replace(batch, items=rewarded, lease=lease, version=PolicyVersion(1, step))


def opened(folder: Path, model_dir: Path, resume: CheckpointRef | None = None, **critic: Any) -> MegatronTrainer:
    keys = {"objective": "ppo", "critic": {"learning_rate": 3e-3, "updates": 3} | critic, "token_budget": 3 * LENGTH}
    paths = {"model_dir": model_dir, "checkpoint_dir": folder / "checkpoints", "snapshot_dir": folder / "weights"}
    return open_trainer(LearnerConfig.model_validate(keys | paths), resume, 2 if resume else 1)


def weights_of(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    return load_file(trainer.snapshot().files[0].path)


def critic_of(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Copies of the critic's weights and moments."""
    assert isinstance(trainer._ranks, SoleRank)
    critic = trainer._ranks._rank._critic
    assert critic is not None
    return {name: tensor.detach().clone() for name, tensor in critic._optimizer.tensors()}


def test_a_critic_learns_to_predict_the_reward_and_the_policy_follows(tmp_path: Path, tiny_model_dir: Path) -> None:
    trainer = opened(tmp_path, tiny_model_dir)
    try:
        reports = [trainer.step(batch_of(step)).metrics for step in range(15)]
    finally:
        trainer.close()
    first, last = reports[0], reports[-1]
    assert (first["mean_value"], first["explained_variance"]) == (0.0, 0.0)
    assert first["critic_loss"] == pytest.approx(0.5 * 0.5, rel=1e-5), "half of the rewards are 1, and values are 0"
    assert last["explained_variance"] > 0.8
    assert last["critic_loss"] < 0.2 * first["critic_loss"]
    assert first["grad_norm"] > 0
    assert last["loss"] != first["loss"]


def test_the_policy_is_frozen_while_the_critic_warms_up(tmp_path: Path, tiny_model_dir: Path) -> None:
    start = load_file(tiny_model_dir / "model.safetensors")
    trainer = opened(tmp_path, tiny_model_dir, warmup_steps=2)
    try:
        same, critics = [], [critic_of(trainer)]
        for step in range(3):
            report = trainer.step(batch_of(step))
            weights = weights_of(trainer)
            same.append(all(torch.equal(weights[name], start[name]) for name in start))
            critics.append(critic_of(trainer))
    finally:
        trainer.close()
    assert same == [True, True, False]
    assert report.version == PolicyVersion(1, 3)
    head = "value_head.weight"
    assert not any(torch.equal(before[head], after[head]) for before, after in pairwise(critics))


def test_a_gradient_that_is_not_finite_changes_neither_policy_nor_critic(tmp_path: Path, tiny_model_dir: Path) -> None:
    """F7."""
    trainer = opened(tmp_path, tiny_model_dir)
    try:
        trainer.step(batch_of(0))
        before, critic = weights_of(trainer), critic_of(trainer)
        report = trainer.step(batch_of(1, spoiled=True))
        after, critic_after = weights_of(trainer), critic_of(trainer)
    finally:
        trainer.close()
    assert report.skipped
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(critic_after[name], critic[name]) for name in critic)


def test_a_resumed_critic_continues_bit_for_bit(tmp_path: Path, tiny_model_dir: Path) -> None:
    trainer = opened(tmp_path, tiny_model_dir)
    try:
        for step in range(2):
            trainer.step(batch_of(step))
        checkpoint = trainer.save()
        straight = trainer.step(batch_of(2)).metrics
        weights, critic = weights_of(trainer), critic_of(trainer)
    finally:
        trainer.close()
    trainer = opened(tmp_path / "again", tiny_model_dir, checkpoint)
    try:
        resumed = trainer.step(batch_of(2)).metrics
        again, critic_again = weights_of(trainer), critic_of(trainer)
    finally:
        trainer.close()
    assert {**straight, "seconds": 0} == {**resumed, "seconds": 0}
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert critic_again.keys() == critic.keys()
    assert all(torch.equal(critic_again[name], critic[name]) for name in critic)


@pytest.mark.parametrize("budget", [LENGTH, 10_000])
def test_micro_batches_change_a_critics_step_only_by_rounding(
    tmp_path: Path, tiny_model_dir: Path, budget: int
) -> None:
    found = []
    for tokens in (3 * LENGTH, budget):
        config = LearnerConfig.model_validate(
            {
                "objective": "ppo",
                "critic": {"learning_rate": 3e-3},
                "token_budget": tokens,
                "model_dir": tiny_model_dir,
                "checkpoint_dir": tmp_path / "checkpoints",
                "snapshot_dir": tmp_path / str(tokens),
            }
        )
        trainer = open_trainer(config, None, 1)
        try:
            found.append([trainer.step(batch_of(step)).metrics for step in range(2)])
        finally:
            trainer.close()
    for one, other in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "critic_loss", "critic_grad_norm", "mean_value"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6)
