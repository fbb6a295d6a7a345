"""Runs over real Ray, with simulated parts, in which something hangs or fails: they go on, or they end and say why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.errors import RunStalled
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.launch import RunRequest, prepare
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.buffer.audit.evidence import read_evidence
from headrace.buffer.audit.verify import verify
from support import run_rig as rig

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("ray_cluster")]

STEPS = 6


@pytest.fixture
def open_run(tmp_path: Path) -> Any:
    recipe = rig.RECIPE.with_name("simulated.toml")

    @asynccontextmanager
    async def open_run(name: str, *overrides: str) -> AsyncIterator[tuple[Service, RunDirectory]]:
        options = (*rig.QUICK, f"training.steps={STEPS}", *overrides)
        config, directory = prepare(RunRequest(recipe=recipe, runs_dir=tmp_path, name=name, overrides=options))
        runtime = RayRuntime(f"{name}-")
        service = await runtime.spawn(Service, config, directory, runtime, name="service")
        try:
            yield service, directory
        finally:
            await runtime.stop(service)

    return open_run


def epochs_of(directory: RunDirectory) -> set[str]:
    return {record["version"].split(".")[0] for record in read_metrics(directory.metrics) if record["kind"] == "push"}


async def test_a_learner_whose_step_never_finishes_is_killed_and_the_run_continues(open_run: Any) -> None:
    async with open_run("hung", "learner.simulated.hang_at_step=4", "training.stage_timeout_s=10") as (
        service,
        directory,
    ):
        assert await service.run()
    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.steps, report.trained_twice, report.lost) == (STEPS, 0, 0)
    assert report.steps_rolled_back == 1, "the step after the checkpoint was done again"
    assert epochs_of(directory) == {"1", "2"}


@pytest.mark.slow
async def test_a_run_whose_learner_always_hangs_ends_with_an_error_naming_the_learner(open_run: Any) -> None:
    """Each learner is killed after its stage's clock; the stall detector ends what that does not help."""
    options = (
        "training.stage_timeout_s=4",
        "service.stall_s=25",
        "learner.simulated.hang_at_step=3",
        "learner.simulated.hangs_again=true",
        # Otherwise two hung learners end the run as one whose batch cannot be trained.
        "buffer.batch_tries=100",
    )
    async with open_run("stuck", *options) as (service, directory):
        with pytest.raises(RunStalled, match=r"no progress for 25 s .*steps \d+ s ago.*learner \d+% of 1"):
            await service.run()
    assert verify(directory.path).clean


@pytest.mark.slow
async def test_a_run_whose_engines_never_respond_ends_with_an_error_naming_them(open_run: Any) -> None:
    options = ("agent.simulated.stuck_turns=1", "service.stall_s=25", "evaluation.tasks=1")
    async with open_run("silent", *options) as (service, directory):
        with pytest.raises(RunStalled, match=r"no progress for 25 s .*held up by engine"):
            await service.run()
    assert verify(directory.path).clean


async def test_attempts_failed_by_engines_get_no_reward(open_run: Any) -> None:
    options = ("agent.simulated.failing_turns=0.05", "buffer.max_attempts=50")
    async with open_run("failing", *options) as (service, directory):
        assert await service.run()
    report = verify(directory.path)
    assert report.clean, report.problems
    assert (report.steps, report.poison) == (STEPS, 0)
    failed = [attempt for attempt in read_evidence(directory.path).attempts if attempt.cause == "infra"]
    assert failed
    assert {attempt.reward for attempt in failed} == {None}


@pytest.mark.slow
async def test_engines_that_fail_every_turn_end_the_run(open_run: Any) -> None:
    async with open_run("broken", "agent.simulated.failing_turns=1", "service.stall_s=25") as (service, directory):
        with pytest.raises(RunStalled, match=r"no progress for 25 s .*orders are held: \d+ of the last") as stalled:
            await service.run()
    assert len(str(stalled.value)) < 4000
    assert verify(directory.path).clean
