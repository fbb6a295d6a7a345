"""slime as a learner, on two logical GPUs, driven by LearnerLoop from a real ledger."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.buffer.audit.verify import verify
from headrace.policies.errors import CheckpointMismatch, LearnerSettingsInvalid, RowUnusable
from headrace.policies.learners.checkpoints import check_checkpoint, list_checkpoints, read_manifest
from headrace.policies.models.qwen_config import check_computable
from support import slime_rig as rig

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900), pytest.mark.usefixtures("slime_ray")]


def steps_of(directory: RunDirectory) -> list[dict[str, Any]]:
    return [record for record in read_metrics(directory.metrics) if record["kind"] == "step"]


async def test_a_run_trains_pushes_saves_and_resumes(tmp_path: Path, bf16_model: Path) -> None:
    async with rig.open_run(tmp_path, bf16_model, steps=3, save_every=2) as run, run.producing():
        learner = await run.learner()
        end = await learner.run()
        assert len(rig.ranks()) == rig.RANKS
        await run.runtime.stop(learner)
        assert rig.ranks() == []
    assert (str(end.version), end.used_up) == ("1.3", False)

    async with rig.open_run(tmp_path, bf16_model, steps=5, save_every=2) as run, run.producing():
        learner = await run.learner()
        assert str((await learner.run()).version) == "2.5"
        await run.runtime.stop(learner)
    report = verify(run.directory.path)
    assert report.clean, report.problems
    assert [path.name for path in list_checkpoints(run.directory.checkpoints)] == ["1.3", "2.4", "2.5"]
    # Only the two newest snapshots are kept; all of them were pushed.
    assert sorted(path.name for path in (run.directory.path / "weights").iterdir()) == ["2.4", "2.5"]
    pushed = tmp_path / "pushed"
    assert sorted(path.name for path in pushed.iterdir()) == ["1.0", "1.1", "1.2", "1.3", "2.3", "2.4", "2.5"]

    # What was pushed before any step is the model, bit for bit; a resumed learner pushes what its predecessor did.
    model, first = rig.weights_of(bf16_model), rig.weights_of(pushed / "1.0")
    assert first.keys() == model.keys()
    assert all(torch.equal(first[name], model[name]) for name in model)
    last, resumed = rig.weights_of(pushed / "1.3"), rig.weights_of(pushed / "2.3")
    assert all(torch.equal(last[name], resumed[name]) for name in model)
    assert not any(torch.equal(last[name], model[name]) for name in model if "proj" in name)

    steps = steps_of(run.directory)
    assert [step["version"] for step in steps] == ["1.1", "1.2", "1.3", "2.4", "2.5"]
    assert all(step["grad_norm"] > 0 and step["learning_rate"] == 1e-3 for step in steps)
    # The first batch was sampled by the weights that slime then computes its log-probabilities with, in bf16.
    assert 0 < steps[0]["train_rollout_logprob_abs_diff"] <= 0.02


async def test_a_resumed_learner_repeats_the_next_step(tmp_path: Path, bf16_model: Path) -> None:
    model = rig.read_model(bf16_model)
    first, second, third = (rig.make_batch(model, number) for number in range(3))
    terms = rig.terms(tmp_path, bf16_model, warmup_steps=2)
    async with rig.open_learner(terms) as learner:
        await learner.open(None, epoch=1)
        reports = [await learner.step(batch) for batch in (first, second)]
        assert await learner.step(second) == reports[-1], "a batch is trained once"
        checkpoint = await learner.save()
        straight, weights = await learner.step(third), await learner.snapshot()
        with pytest.raises(RowUnusable, match="temperature"):
            hot = rig.make_batch(model, 9, temperature=0.5)
            await learner.step(hot)
    assert [report.metrics["learning_rate"] for report in reports] == pytest.approx([5e-4, 1e-3])
    saved = tmp_path / "checkpoints" / "1.2"
    assert read_manifest(saved).chain == checkpoint.chain
    assert check_checkpoint(saved) == checkpoint
    # The checkpoint is a model directory as well, with which a model can be evaluated or started.
    check_computable(saved)
    assert (saved / "tokenizer.json").read_bytes() == (bf16_model / "tokenizer.json").read_bytes()
    assert rig.weights_of(saved).keys() == rig.weights_of(bf16_model).keys()
    async with rig.open_learner(rig.terms(tmp_path, bf16_model, objective="gspo")) as other:
        with pytest.raises(CheckpointMismatch, match=r"objective grpo.*set learner.objective to grpo"):
            await other.open(checkpoint, epoch=2)

    async with rig.open_learner(terms) as learner:
        state = await learner.open(checkpoint, epoch=2)
        assert (state.step, state.chain, state.parent) == (2, checkpoint.chain, checkpoint.version)
        again, resumed = await learner.step(third), await learner.snapshot()
    for name in ("loss", "grad_norm", "clip_fraction", "train_rollout_logprob_abs_diff"):
        assert again.metrics[name] == straight.metrics[name]
    assert resumed.directory is not None
    assert weights.directory is not None
    assert resumed.directory.digests == weights.directory.digests


async def test_a_non_finite_gradient_is_committed_as_skipped(tmp_path: Path, bf16_model: Path) -> None:
    async with rig.open_run(tmp_path, bf16_model, steps=2) as run:
        run.spoiled = 8
        async with run.producing():
            learner = await run.learner()
            assert str((await learner.run()).version) == "1.2"
            await run.runtime.stop(learner)
    report = verify(run.directory.path)
    assert report.clean, report.problems
    steps = steps_of(run.directory)
    skipped = [step["skipped"] for step in steps]
    assert sum(skipped) in (1, 2)
    assert [step["version"] for step in steps if not step["skipped"]] == ["1.1", "1.2"]
    assert all("grad_norm" not in step for step in steps if step["skipped"])
    assert not (tmp_path / "pushed" / "1.3").exists()


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"arguments": ("--swigul",)}, "has no flag --swigul: did you mean --swiglu"),
        ({"gpus_per_node": 3}, "need 1 x 3 GPUs, but the Ray cluster has 2, on its nodes with the label"),
        ({"nodes": 2, "gpus_per_node": 2}, "need 2 x 2 GPUs, but the Ray cluster has 2"),
        # Engines' nodes have GPUs too.
        ({"node_label": "engines"}, "has none, on its nodes with the label headrace/role=engines: add nodes to it"),
        ({"arguments": ("--num-layers", "many")}, "invalid int value: 'many'"),
    ],
)
async def test_a_learner_with_impossible_settings_does_not_open(
    tmp_path: Path, bf16_model: Path, section: dict[str, Any], problem: str
) -> None:
    given = (*rig.model_arguments(bf16_model), *rig.CPU_ARGUMENTS, *section.pop("arguments", ()))
    label = section.pop("node_label", rig.LABEL)
    terms = rig.terms(tmp_path, bf16_model, slime={"arguments": given, **section}, node_label=label)
    async with rig.open_learner(terms) as learner:
        with pytest.raises(LearnerSettingsInvalid, match=problem):
            await learner.open(None, epoch=1)
    assert rig.ranks() == []


async def test_a_rank_that_fails_is_seen_before_the_others_give_up(tmp_path: Path, bf16_model: Path) -> None:
    words = [word.replace("get_spec", "get_spec_but_on_rank_1") for word in rig.CPU_ARGUMENTS]
    section = {"arguments": (*rig.model_arguments(bf16_model), *words), "timeout_minutes": 30}
    terms = rig.terms(tmp_path, bf16_model, slime=section)
    async with rig.open_learner(terms) as learner:
        # Far below the time limit of the collective in which rank 0 waits.
        async with asyncio.timeout(300):
            with pytest.raises(LearnerSettingsInvalid, match="rank 1 of 2 failed: RuntimeError: rank 1 has no layers"):
                await learner.open(None, epoch=1)
        assert rig.ranks() == []
