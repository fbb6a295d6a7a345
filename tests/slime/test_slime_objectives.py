"""Terms of the objective in real steps of slime on two ranks, against those of the Megatron learner."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.record.files.logprob_drift import mismatch_alarm
from headrace.buffer.trajectories.step_scores import Credit, ScoredStep, StepScores, TokenSpan
from headrace.buffer.trajectories.token_kinds import TokenKind
from headrace.buffer.trajectories.types import Batch, BatchItem, Row, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.megatron_trainer import open_trainer
from headrace.policies.learners.slime.arguments import SlimeTerms
from headrace.policies.models.qwen import Qwen
from support import slime_rig as rig

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900), pytest.mark.usefixtures("slime_ray")]
MEGATRON_WARNS = pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning")

OLDER = PolicyVersion(1, 9)
LAG = 0.15
"""Shift of the recorded log-probabilities of tokens that an older version sampled, in nats."""


def eventful_batch(model: Qwen, number: int) -> Batch:
    """Observations in every row, turns with advantages of their own, and rollouts of an older version."""
    batch = rig.make_batch(model, number)
    items = [eventful(item, stale=index % 2 == 1) for index, item in enumerate(batch.items)]
    return replace(batch, items=tuple(items), staleness={OLDER: 3})


def eventful(item: BatchItem, *, stale: bool) -> BatchItem:
    rows = tuple(observing(row, stale=stale) for row in item.trajectory.rows)
    span = TokenSpan(0, rig.PROMPT, rig.PROMPT + 2)
    scores = StepScores(credit=Credit.STEPS, outcome=0.0, coefficient=1.0, steps=(ScoredStep(1, 1.0, (span,)),))
    turns = {} if stale else {1: -2 * item.advantage}
    return replace(item, trajectory=replace(item.trajectory, rows=rows), scores=scores, turn_advantages=turns)


def observing(row: Row, *, stale: bool) -> Row:
    kinds = np.where(row.loss_mask_T, TokenKind.SAMPLED, TokenKind.OBSERVATION).astype(np.uint8)
    kinds[:2], kinds[rig.PROMPT - 1] = TokenKind.PROMPT, TokenKind.WARNING
    if not stale:
        return replace(row, kinds_T=kinds)
    versions = tuple(replace(span, version=OLDER) for span in row.versions)
    shifted = np.where(row.loss_mask_T, row.logprobs_T - LAG, 0).astype(np.float32)
    return replace(row, kinds_T=kinds, versions=versions, logprobs_T=shifted)


def megatron_step(folder: Path, model: Path, keys: dict[str, Any], batch: Batch) -> StepReport:
    """The same step by the Megatron learner, in fp32."""
    folders = {"model_dir": model, "checkpoint_dir": folder / "checkpoints", "snapshot_dir": folder / "weights"}
    config = LearnerConfig.model_validate(folders | {"token_budget": 256, **keys})
    trainer = open_trainer(config, None, 1)
    try:
        return trainer.step(batch)
    finally:
        trainer.close()


def with_flags(folder: Path, model: Path, *flags: str, **keys: Any) -> SlimeTerms:
    arguments = (*rig.model_arguments(model), *rig.CPU_ARGUMENTS, *flags)
    return rig.terms(folder, model, slime={"arguments": arguments}, **keys)


@MEGATRON_WARNS
@pytest.mark.parametrize(
    ("keys", "flags"),
    [
        ({"correction": "none", "kl_coef": 0.3, "kl_kind": "k1", "loss_weight": "token"}, ()),
        # The loss is then computed a second time, for its gradient.
        ({"correction": "tis", "observation_coef": 0.5, "observation_target": "full"}, ("--recompute-loss-function",)),
    ],
    ids=["kl", "observations"],
)
async def test_a_step_is_that_of_the_megatron_learner(
    tmp_path: Path, bf16_model: Path, keys: dict[str, Any], flags: tuple[str, ...]
) -> None:
    batch = eventful_batch(rig.read_model(bf16_model), 0)
    async with rig.open_learner(with_flags(tmp_path, bf16_model, *flags, **keys)) as learner:
        await learner.open(None, epoch=1)
        report = await learner.step(batch)
    expected = await asyncio.to_thread(megatron_step, tmp_path / "megatron", bf16_model, keys, batch)
    for name in {"loss", "grad_norm", "observation_loss_scaled"} & expected.metrics.keys():
        assert report.metrics[name] == pytest.approx(expected.metrics[name], rel=0.02, abs=2e-3), name
    # Mismatch and lag are told apart by the staleness of each token.
    assert report.drift is not None
    assert expected.drift is not None
    assert report.drift.by_staleness.keys() == expected.drift.by_staleness.keys() == {0, 3}
    for staleness, ratios in expected.drift.by_staleness.items():
        found = report.drift.by_staleness[staleness]
        assert found.tokens == ratios.tokens
        assert found.mean_ratio == pytest.approx(ratios.mean_ratio, rel=0.02)
    assert report.drift.by_staleness[3].mean_abs_log_ratio == pytest.approx(LAG, abs=0.02)
    assert report.metrics["train_rollout_logprob_abs_diff"] > 0.05
    assert mismatch_alarm(report, above=0.05) is None
    alarm = mismatch_alarm(report, above=1e-7)
    assert alarm is not None
    assert alarm.tokens == report.drift.by_staleness[0].tokens


async def test_a_resumed_learner_has_the_start_model_as_reference(tmp_path: Path, bf16_model: Path) -> None:
    model = rig.read_model(bf16_model)
    first, second = (rig.make_batch(model, number) for number in range(2))
    terms = rig.terms(tmp_path, bf16_model, kl_coef=0.5)
    async with rig.open_learner(terms) as learner:
        await learner.open(None, epoch=1)
        start = await learner.step(first)
        checkpoint = await learner.save()
        straight = await learner.step(second)
    # The policy in training is the reference itself, by the same computation.
    assert start.metrics["kl"] == 0
    trained = rig.read_model(tmp_path / "checkpoints" / "1.1")
    assert straight.metrics["kl"] == pytest.approx(divergence(trained, model, second), rel=0.1)
    assert straight.metrics["kl"] > 1e-3
    async with rig.open_learner(terms) as learner:
        await learner.open(checkpoint, epoch=2)
        again = await learner.step(second)
    for name in ("kl", "loss", "grad_norm"):
        assert again.metrics[name] == straight.metrics[name]


async def test_a_teacher_and_hooks_of_the_user_act(tmp_path: Path, bf16_model: Path) -> None:
    """Advantages are whitened, then moved towards the teacher. That is the model itself here: a large coefficient
    multiplies the mismatch. slime's dump has the log-probabilities, which headrace takes from the same place."""
    batch = rig.make_batch(rig.read_model(bf16_model), 0)
    dump = tmp_path / "train" / "{rollout_id}.pt"
    flags = (
        *("--normalize-advantages", "--use-opd", "--opd-type", "megatron", "--opd-teacher-load", str(bf16_model)),
        *("--opd-kl-coef", "1000", "--save-debug-train-data", str(dump)),
    )
    losses = []
    for given in ((), flags):
        async with rig.open_learner(with_flags(tmp_path / str(len(given)), bf16_model, *given)) as learner:
            await learner.open(None, epoch=1)
            report = await learner.step(batch)
        assert report.drift is not None
        losses.append(report.metrics["pg_loss"])
    assert abs(losses[1] - losses[0]) > 0.1
    [written] = (tmp_path / "train").glob("*.pt")
    assert "'log_probs'" in str(torch.load(written, weights_only=False))


def divergence(model: Qwen, reference: Qwen, batch: Batch) -> float:
    """The mean over rollouts of the means over their tokens of k3, by the embedded engine's model."""
    means = []
    for item in batch.items:
        values = []
        for row in item.trajectory.rows:
            tokens = torch.from_numpy(row.tokens_T.astype(np.int64))
            logprobs = [
                each.logits([tokens.tolist()])[0].float().log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
                for each in (model, reference)
            ]
            distance = (logprobs[1] - logprobs[0])[torch.from_numpy(row.loss_mask_T[1:])]
            values.append(distance.exp() - 1 - distance)
        means.append(float(torch.cat(values).mean()))
    return sum(means) / len(means)
