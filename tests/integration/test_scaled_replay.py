"""Short forms of the benches with simulated parts: a plan in scaled time over Ray, and the orchestration under load.
The long forms are in `test_benches`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from benches.load import TURNS, load_plan, run_load
from benches.scaled_replay import compare, prepare_plan, scaled

from headrace.actors.errors import ConfigError
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import InlineRuntime, RayRuntime
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.simulation.virtual.plan import SimulationPlan, make_plan
from headrace.buffer.tasks.task import load_tasks

MINUTE_S = 0.1


async def replay_over(runtime: RayRuntime, plan: SimulationPlan, directory: RunDirectory) -> None:
    config = prepare_plan(scaled(plan, MINUTE_S / 60), directory)
    service = await runtime.spawn(Service, config, directory, runtime, name="service")
    try:
        assert await service.run()
    finally:
        await runtime.stop(service)


def test_real_and_virtual_time_are_both_reported(ray_cluster: None, tmp_path: Path) -> None:
    """Both are read from their own ledgers; their agreement can be checked on an idle machine only."""
    plan = make_plan("swe64", {"slots": 16, "steps": 12, "max_staleness": 2, "batch_size": 16})
    directory = RunDirectory(path=tmp_path / "run")
    asyncio.run(replay_over(RayRuntime("replay-"), plan, directory))
    replayed = compare(plan, directory, minute_s=MINUTE_S, wall_s=1.0)
    assert replayed.problems() == []
    assert replayed.real.trained == replayed.virtual.trained == 12 * 16
    # No call is faster than one that takes no time; a stall of the machine before the first of six steps shortens them.
    assert 0.8 < replayed.real_over_virtual < 3
    told = replayed.to_json()
    assert told["measured_steps"] == 6
    assert 0 < told["real"]["max_staleness_seen"] <= 2
    assert told["real"]["fraction_of_ideal"] == pytest.approx(
        told["virtual"]["fraction_of_ideal"] / told["real_over_virtual"]
    )


def test_scaling_a_plan_changes_only_its_times() -> None:
    plan = make_plan("swe64", {"steps": 4})
    small = scaled(plan, 1 / 200)
    assert small.ideal_s == pytest.approx(plan.ideal_s / 200)
    assert (small.learner_s, small.push_s) == (pytest.approx(1.2), pytest.approx(0.05))
    recorded = plan.model_copy(update={"durations": DurationsConfig(recorded_s=(60.0, 120.0))})
    assert scaled(recorded, 0.5).durations.recorded_s == (30.0, 60.0)
    assert scaled(plan, 1.0) == plan


def test_real_and_virtual_time_use_the_same_configs(tmp_path: Path) -> None:
    """The actors of the real service get the plan's configuration."""
    plan = make_plan("swe64", {"slots": 48, "steps": 4, "seed": 3}, ["evaluate_s=2.5"])
    directory = RunDirectory(path=tmp_path / "run")
    config = prepare_plan(plan, directory)
    assert config.buffer == plan.buffer_config()
    assert config.agent.simulated == plan.agent_config()
    assert config.rollout == plan.rollout_config()
    assert config.engines.simulated == plan.engines_config()
    assert config.sandbox == plan.sandbox_section()
    assert config.training.model_copy(update={"stage_timeout_s": 0.0}) == plan.loop_config().model_copy(
        update={"stage_timeout_s": 0.0}
    ), "but for the clock that a run derives"
    assert config.dispatcher.slots_per_worker == 48
    assert load_tasks(directory.train_tasks) == plan.task_set()
    with pytest.raises(ConfigError, match="chances"):
        prepare_plan(plan.model_copy(update={"chances": (0.5,)}), RunDirectory(path=tmp_path / "other"))


@pytest.mark.parametrize("runtime", [InlineRuntime(), RayRuntime("load-")], ids=["inline", "ray"])
def test_a_load_pass_completes_and_is_measured(ray_cluster: None, tmp_path: Path, runtime: Any) -> None:
    plan = load_plan(rollouts=128, in_flight=64, turn_s=0.02)
    loaded = asyncio.run(run_load(plan, runtime, RunDirectory(path=tmp_path / "run"), idle_s=0.2))
    assert loaded.measured.rollouts == 128
    # Two fillings of the slots cannot take less than their turns.
    assert loaded.wall_s >= 2 * TURNS * 0.02
    assert loaded.measured.cpu_s > 0
    assert (loaded.measured.calls > 0) is isinstance(runtime, RayRuntime)
