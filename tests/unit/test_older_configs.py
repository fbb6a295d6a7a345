"""Run directories of older versions are opened by this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.actors.errors import RunMissing
from headrace.actors.run.config import RunConfig
from headrace.actors.run.launch import RunRequest, prepare, reopen
from headrace.actors.run.older_configs import upgraded
from headrace.actors.run.resume import ResumePreparation
from headrace.buffer.core.config import BufferConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "config_v1.json"
"""What an early version wrote for the quickstart, its paths made relative."""


def test_an_early_versions_configuration_is_read(tmp_path):
    (tmp_path / "config.json").write_bytes(GOLDEN.read_bytes())
    old = json.loads(GOLDEN.read_bytes())
    config, directory = reopen(tmp_path)
    assert config.agent.shell.max_turns == old["agent"]["max_turns"]
    assert config.agent.shell.max_observation_bytes == old["agent"]["max_observation_bytes"]
    assert config.buffer.max_staleness == old["buffer"]["max_staleness"]
    assert config.learner.checkpoint_dir == directory.checkpoints


def test_a_current_configuration_is_read_unchanged(tmp_path):
    (tmp_path / "config.json").write_bytes(GOLDEN.read_bytes())
    document = reopen(tmp_path)[0].model_dump(mode="json")
    assert upgraded(document) == document
    assert RunConfig.model_validate(document).model_dump(mode="json") == document


@pytest.mark.parametrize(
    "change", [{"agent": {"unknown": 1}}, {"learner": None}, {"buffer": {"batch_size": -1}}, {"rollout": 3}]
)
def test_a_configuration_that_no_version_wrote_is_refused(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps(json.loads(GOLDEN.read_bytes()) | change))
    with pytest.raises(RunMissing, match="not a run configuration"):
        reopen(tmp_path)


def test_an_older_run_keeps_the_first_rounds_advantages_and_says_so(tmp_path):
    (tmp_path / "config.json").write_bytes(GOLDEN.read_bytes())
    config, directory = reopen(tmp_path)
    assert config.buffer.advantage == "grpo_first_round"
    assert resume_lines(config, directory)[0].startswith(
        "advantages: grpo_first_round, which this run was started with"
    )


@pytest.mark.parametrize(("before", "now"), [("centered", "leave_one_out"), ("grpo", "grpo_first_round")])
def test_kinds_of_advantages_of_older_configurations_are_renamed(before, now):
    old = json.loads(GOLDEN.read_bytes())
    old["buffer"]["advantage"] = before
    assert BufferConfig.model_validate(upgraded(old)["buffer"]).advantage == now


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "leave_one_out"])
def test_a_new_run_keeps_its_own_kind_of_advantages(tmp_path, kind):
    recipe = Path("scripts/recipes/simulated.toml").absolute()
    request = RunRequest(recipe=recipe, runs_dir=tmp_path, name="run", overrides=(f"buffer.advantage={kind}",))
    config, directory = prepare(request)
    again, _ = reopen(directory.path)
    assert again == config
    assert again.buffer.advantage == kind
    assert not any("advantages" in line for line in resume_lines(again, directory))


def resume_lines(config, directory):
    """What a resume prints while nothing was recorded."""
    said = []
    ResumePreparation(config, directory, say=said.append).prepare()
    return said


def test_a_configuration_of_a_newer_version_is_refused(tmp_path):
    document = json.loads(GOLDEN.read_bytes()) | {"recorded": {"schema": 99}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(RunMissing, match=r"schema is 99, this version reads up to \d+: upgrade headrace"):
        reopen(tmp_path)


def test_constant_timeouts_from_older_versions_are_replaced_by_derived_ones(tmp_path):
    """A run of the agent recipes of that time: its stall clock was a tenth of its agents' time."""
    old = json.loads(GOLDEN.read_bytes())
    old["rollout"] |= {"agent_timeout_s": 1800.0, "evaluate_timeout_s": 600.0, "guard_s": 2700.0}
    old["gateway"]["turn_timeout_s"] = 500.0
    old["service"]["stall_s"] = 180.0
    (tmp_path / "config.json").write_text(json.dumps(old))
    config, _ = reopen(tmp_path)
    assert config.service.stall_s == 3600
    assert config.rollout.guard_s > 1800 + 600
    assert config.gateway.turn_timeout_s == 500, "what was set stays"
    assert config.gateway.gate_wait_s == 156
