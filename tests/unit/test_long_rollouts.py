"""Rollouts as long as the published ones, in virtual time: their silences are no stall."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.actors.run.config import load_recipe
from headrace.actors.run.parts import supervised_actors
from headrace.actors.run.progress_signs import StallDetector, signs_of, stall_detector, work_clocks
from headrace.actors.run.supervision import snapshot_of
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.simulation.virtual.plan import SimulationPlan, make_plan
from headrace.actors.simulation.virtual.plan_service import open_service
from headrace.actors.simulation.virtual.virtual_time import run_virtual

pytestmark = pytest.mark.whole

RECIPE = Path(__file__).parents[2] / "scripts" / "recipes" / "claude_code.toml"
ANSWERS = 256
"""Of a base evaluation: 64 tasks, 4 samples."""
LOOK_S = 5.0


async def evaluate_watched(plan: SimulationPlan, stall_s: float | None) -> list[str]:
    """What the stall detector says during a base evaluation, by the recipe's clock or another one."""
    config = load_recipe(RECIPE, (), Path("run"))
    said: list[str] = []
    clock = asyncio.get_running_loop().time
    async with open_service(plan, InlineRuntime(), clock=clock) as service, asyncio.TaskGroup() as tasks:
        await service.actors.learner.open()
        detector = stall_detector(config, clock()) if stall_s is None else StallDetector(clock(), stall_s)

        async def watch() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                status = await snapshot_of(supervised_actors(service.actors, service.actors.learner))
                signs = signs_of(status, work_clocks(config))
                lines = (detector.stalled(clock(), signs), detector.warning(clock()))
                said.extend(line for line in lines if line is not None)

        watching = tasks.create_task(watch())
        await service.actors.dispatcher.evaluate(plan.task_set()[:ANSWERS], samples=1, tag="base")
        watching.cancel()
    return said


@pytest.mark.parametrize("seed", range(2))
def test_a_base_evaluation_with_published_durations_is_not_a_stall(seed: int) -> None:
    assert run_virtual(evaluate_watched(make_plan("swe64", {"seed": seed}), None)) == []


def test_turns_count_as_progress_before_the_end_of_a_rollout() -> None:
    """With a clock that is shorter than the rollouts, and longer than their turns."""
    plan = make_plan("swe64", {"turns": 64})
    assert run_virtual(evaluate_watched(plan, 200.0)) == []
