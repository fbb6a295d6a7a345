"""slime's parallel sizes with two ranks over gloo: what is loaded, trained, exported and resumed with each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import slime_rig as rig

pytestmark = [pytest.mark.slime, pytest.mark.timeout(900), pytest.mark.usefixtures("slime_ray")]


@pytest.mark.parametrize("name", ("tensor", "pipeline"))
async def test_a_shape_trains_what_data_parallel_ranks_train(tmp_path: Path, even_model: Path, name: str) -> None:
    model = rig.read_model(even_model)
    first, second = (rig.make_batch(model, number) for number in range(2))
    reference = rig.terms(tmp_path / "reference", even_model)
    async with rig.open_learner(reference) as learner:
        await learner.open(None, epoch=1)
        expected = await learner.step(first)

    terms = rig.terms(tmp_path / "shape", even_model, slime=rig.shape_section(even_model, name))
    async with rig.open_learner(terms) as learner:
        await learner.open(None, epoch=1)
        loaded = await learner.snapshot()
        assert loaded.directory is not None
        given, exported = rig.weights_of(even_model), rig.weights_of(loaded.directory.path)
        report = await learner.step(first)
        checkpoint = await learner.save()
        straight, weights = await learner.step(second), await learner.snapshot()
    # The last stage has a copy of the tied embeddings of the first, which engines take for the head.
    head = exported.pop("lm_head.weight", None)
    assert (head is not None) == (name == "pipeline")
    assert head is None or torch.equal(head, given["model.embed_tokens.weight"])
    assert exported.keys() == given.keys()
    assert all(torch.equal(exported[key], given[key]) for key in given)
    for key in ("loss", "grad_norm", "train_rollout_logprob_abs_diff"):
        assert report.metrics[key] == pytest.approx(expected.metrics[key], rel=0.02, abs=2e-3), key
    # Each token is compared once, whichever ranks have it.
    assert report.drift is not None
    assert expected.drift is not None
    assert report.drift.by_staleness[0].tokens == expected.drift.by_staleness[0].tokens

    async with rig.open_learner(terms) as learner:
        await learner.open(checkpoint, epoch=2)
        again, resumed = await learner.step(second), await learner.snapshot()
    assert (again.metrics["loss"], again.metrics["grad_norm"]) == (
        straight.metrics["loss"],
        straight.metrics["grad_norm"],
    )
    assert resumed.directory is not None
    assert weights.directory is not None
    assert resumed.directory.digests == weights.directory.digests


def test_a_torch_that_slime_does_not_know_is_refused_for_tensor_parallel_ranks() -> None:
    """Without the stand-ins, which give slime's groups the names that the tests' torch calls."""
    checkouts = rig.checkouts()
    assert checkouts is not None
    code = (
        "from argparse import Namespace\n"
        "from headrace.policies.learners.slime.arguments import refuse_unlike_torch\n"
        "refuse_unlike_torch(Namespace(tensor_model_parallel_size=1), checkout='slime')\n"
        "refuse_unlike_torch(Namespace(tensor_model_parallel_size=2), checkout='slime')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(checkouts[0])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "LearnerSettingsInvalid: learner.slime.tensor_parallel 2: torch 2.13" in done.stderr
    assert "all_gather_single, reduce_scatter_single of process groups" in done.stderr
