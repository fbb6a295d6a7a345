"""Per-rank data and sources, against slime's own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.policies.errors import LearnerSettingsInvalid
from headrace.policies.learners.slime import checkout
from headrace.policies.learners.slime_config import SlimeSection
from support import slime_rig as rig
from support.slime_samples import both

pytestmark = [pytest.mark.slime, pytest.mark.timeout(300)]

LAYOUTS = [
    {"dp_size": ranks, "cp_size": rows, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    for ranks, rows in ((1, 1), (2, 1), (3, 1), (2, 2))
]
IGNORED = {"source_names"}
"""Names of data sets, which slime logs during its rollouts and never in training."""

OF_TOKENS = {"advantages", "values", "returns"}
"""Arrays that slime's ranks otherwise compute themselves."""


@pytest.mark.usefixtures("slime_ray")
def test_per_rank_data_equals_that_of_the_rollout_manager(tmp_path: Path, bf16_model: Path) -> None:
    import ray

    model = rig.read_model(bf16_model)
    # A budget of two rows, so that rollouts are divided among micro-batches.
    terms = rig.terms(tmp_path, bf16_model, token_budget=80)
    batch = rig.make_batch(model, 0)
    assert max(len(item.trajectory.rows) for item in batch.items) == 2
    compared = ray.get(ray.remote(both).options(num_gpus=1).remote(batch, terms, LAYOUTS))
    assert len(compared[0][1][0]["micro_batch_indices"]) > 1
    for ours, theirs in compared:
        assert len(ours) == len(theirs)
        for mine, wanted in zip(ours, theirs, strict=True):
            assert mine.keys() - wanted.keys() == OF_TOKENS
            for name in wanted.keys() - IGNORED:
                assert same(mine[name], wanted[name]), name


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, in type and precision of tensors too."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> SlimeSection:
    """Copies of the files that headrace uses, from the checkouts."""
    folder = tmp_path_factory.mktemp("sources")
    places = [Path(os.environ[name]) for name in ("SLIME_DIR", "MEGATRON_DIR")]
    for place, used in zip(places, (checkout.SLIME_USED, checkout.MEGATRON_USED), strict=True):
        for file in used:
            target = folder / place.name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(place / file, target)
    return SlimeSection(slime_dir=folder / places[0].name, megatron_dir=folder / places[1].name)


def test_the_checkouts_are_those_that_headrace_is_written_for() -> None:
    places = rig.checkouts()
    assert places is not None
    slime, megatron = checkout.find_checkouts(SlimeSection(slime_dir=places[0], megatron_dir=places[1]))
    assert (slime.commit, megatron.commit) == (checkout.SLIME_COMMIT, checkout.MEGATRON_COMMIT)


@pytest.mark.parametrize(
    ("file", "name"), [(file, name) for file, names in checkout.SLIME_USED.items() for name in names]
)
def test_a_slime_that_renames_a_function_is_refused_by_name(sources: SlimeSection, file: str, name: str) -> None:
    assert sources.slime_dir is not None
    checkout.find_checkouts(sources)
    path = sources.slime_dir / file
    written = path.read_text()
    function = name.rpartition(".")[2]
    path.write_text(written.replace(f"def {function}(", f"def {function}_2("))
    try:
        with pytest.raises(LearnerSettingsInvalid, match=rf"{file} has no {name}; check out that commit"):
            checkout.find_checkouts(sources)
    finally:
        path.write_text(written)
