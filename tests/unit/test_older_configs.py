"""Run directories of older versions are opened by this one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.actors.errors import RunMissing
from headrace.actors.run.config import RunConfig
from headrace.actors.run.launch import reopen
from headrace.actors.run.older_configs import upgraded

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
