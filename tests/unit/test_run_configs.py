"""The configuration in a run directory is read as it was written; that of another format is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.actors.errors import RunMissing
from headrace.actors.run.config import RunConfig, of_record, recorded
from headrace.actors.run.launch import RunRequest, prepare, reopen

GOLDEN = Path(__file__).parents[1] / "golden" / "config.json"
"""What a run of the quickstart records, its paths made relative (`make_config.py`)."""


def test_the_golden_configuration_is_read_unchanged(tmp_path):
    (tmp_path / "config.json").write_bytes(GOLDEN.read_bytes())
    config, directory = reopen(tmp_path)
    assert config.learner.checkpoint_dir == directory.checkpoints
    stored = json.loads(GOLDEN.read_bytes())
    assert recorded(RunConfig.model_validate(of_record(stored)).model_dump(mode="json")) == stored


@pytest.mark.parametrize(
    "change", [{"agent": {"unknown": 1}}, {"learner": None}, {"buffer": {"batch_size": -1}}, {"rollout": 3}]
)
def test_a_configuration_that_no_version_wrote_is_refused(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(GOLDEN.read_bytes()) | change))
    with pytest.raises(RunMissing, match="not a run configuration"):
        reopen(tmp_path)


@pytest.mark.parametrize("record", [None, {"schema": 2}, {"format": 99}])
def test_a_configuration_of_another_format_is_refused_in_one_line(tmp_path, record):
    document = json.loads(GOLDEN.read_bytes())
    del document["recorded"]
    (tmp_path / "config.json").write_text(json.dumps(document | ({"recorded": record} if record else {})))
    with pytest.raises(RunMissing, match=r"config\.json.*unreleased version of headrace: start a new run") as refused:
        reopen(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "leave_one_out"])
def test_a_run_keeps_its_kind_of_advantages(tmp_path, kind):
    recipe = Path("scripts/recipes/simulated.toml").absolute()
    request = RunRequest(recipe=recipe, runs_dir=tmp_path, name="run", overrides=(f"buffer.advantage={kind}",))
    config, directory = prepare(request)
    again, _ = reopen(directory.path)
    assert again == config
    assert again.buffer.advantage == kind
