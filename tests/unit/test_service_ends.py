"""How a run ends: the ordinary service in this process, over simulated engines, learner, sandboxes and agent."""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.errors import TasksParked
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.run.config import RunConfig
from headrace.actors.run.launch import RunRequest, prepare, reopen
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.training.replay import refuse_all_parked
from headrace.buffer.audit.verify import verify
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.tasks.task import TaskId, load_tasks
from headrace.buffer.trajectories.types import Outcome, RolloutResult
from support.run_rig import RECIPE

WAIT_S = 60.0
QUICK = (
    "agent.simulated.durations.mean_s=0.04",
    "agent.simulated.durations.median_s=0.03",
    "agent.simulated.durations.cap_s=0.1",
    "agent.simulated.turns=1",
    "learner.simulated.step_s=0.02",
    "engines.simulated.push_s=0.01",
    "sandbox.simulated.boot_s=0.01",
    "buffer.batch_size=4",
    "buffer.group_size=2",
    "buffer.max_staleness=2",
    "dispatcher.slots_per_worker=8",
    "evaluation.tasks=1",
)


@pytest.fixture
def open_run(tmp_path: Path) -> Any:
    recipe = RECIPE.with_name("simulated.toml")

    @asynccontextmanager
    async def open_run(*overrides: str) -> AsyncIterator[tuple[Service, RunDirectory]]:
        """A second time the run is resumed."""
        request = RunRequest(recipe=recipe, runs_dir=tmp_path, name="run", overrides=(*QUICK, *overrides))
        config, directory = reopen(tmp_path / "run") if (tmp_path / "run").exists() else prepare(request)
        runtime = InlineRuntime()
        service = await runtime.spawn(Service, config, directory, runtime, name="service")
        try:
            async with asyncio.timeout(WAIT_S):
                yield service, directory
        finally:
            await runtime.stop(service)

    return open_run


def evaluations(directory: RunDirectory) -> list[tuple[str, int]]:
    return [
        (record["tag"], record["step"]) for record in read_metrics(directory.metrics) if record["kind"] == "evaluation"
    ]


async def park_all(directory: RunDirectory, config: RunConfig) -> None:
    """Every attempt fails, on two hosts at two times."""
    now = 0.0
    tasks = load_tasks(directory.train_tasks)
    run_id, seed = directory.identity.read_text(), config.service.seed
    async with await ReplayStore.open(
        directory.path, config.buffer, tasks, run_id=run_id, seed=seed, clock=lambda: now
    ) as store:
        version = await store.open_epoch(None)
        hosts = itertools.cycle(("a", "b"))
        while len(store.status().parked) < len(tasks):
            host = next(hosts)
            failed = [
                RolloutResult(
                    rollout_id=order.rollout_id,
                    attempt=order.attempt,
                    outcome=Outcome.infra("no such image"),
                    trajectory=None,
                    host=host,
                )
                for order in await store.issue(6, version)
            ]
            now += 100.0
            await store.offer_many(failed)


async def test_a_run_whose_tasks_are_all_parked_fails_with_their_reason(open_run: Any, tmp_path: Path) -> None:
    async with open_run("tasks.train_count=3", "training.steps=3", "buffer.max_attempts=2"):
        pass
    config, directory = reopen(tmp_path / "run")
    await park_all(directory, config)
    for _ in range(2):
        async with open_run() as (service, _):
            with pytest.raises(
                TasksParked, match=r"after 0 steps: 3 tasks are parked, last simulated-.*no such image"
            ) as end:
                await service.run()
        assert "passes" not in str(end.value)


async def test_the_end_of_the_data_completes_a_run(open_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    options = ("tasks.train_count=6", "buffer.passes=1", "training.steps=40", "evaluation.every_steps=30")
    for _ in range(2):
        caplog.clear()
        async with open_run(*options) as (service, directory):
            with caplog.at_level(logging.WARNING, logger="headrace.actors.run.service"):
                assert await service.run()
            assert (await service.progress()).phase == "done"
        assert "the data is used up (buffer.passes = 1) after 3 of 40 steps" in caplog.text
        assert evaluations(directory) == [("base", 0), ("final", 3)]
    assert verify(directory.path).clean


SLOW_EVALUATIONS = (
    "dispatcher.evaluation_slots=1",
    "evaluation.every_steps=3",
    "evaluation.samples_on_the_way=100",
    "evaluation.samples=1",
    "learner.simulated.step_s=0.5",
    "training.steps=8",
)


@pytest.mark.whole
async def test_a_periodic_evaluation_that_has_started_is_recorded_before_the_final_one(
    open_run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_run(*SLOW_EVALUATIONS) as (service, directory):
        with caplog.at_level(logging.WARNING, logger="headrace.actors.run.service"):
            assert await service.run()
    base, on_the_way, final = evaluations(directory)
    assert (base, final) == (("base", 0), ("final", 8))
    assert on_the_way[0] == "step-3"
    assert 3 <= on_the_way[1] < 8, "the step at which it began"
    assert "evaluation step-6 is skipped: it had not started when training ended" in caplog.text


async def test_a_drained_run_does_not_wait_for_an_evaluation(open_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    async with open_run(*SLOW_EVALUATIONS) as (service, directory), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(service.run())
        assert await service.reached(3)
        await service.drain()
        assert not await running
        assert "left out" not in caplog.text
        assert evaluations(directory) == [("base", 0)]


async def test_draining_cancels_the_base_evaluation(open_run: Any) -> None:
    """Held-out tasks take as long as agents do; a scheduler waits 30 s."""
    long = ("agent.simulated.durations.mean_s=50", "agent.simulated.durations.cap_s=50")
    async with open_run(*long, "agent.simulated.durations.median_s=50") as (service, directory):
        async with asyncio.timeout(WAIT_S / 2), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(service.run())
            while (await service.progress()).rollouts_in_flight == 0:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
            await service.drain()
            assert not await running
        assert evaluations(directory) == []
    assert verify(directory.path).clean
    async with open_run() as (service, directory), asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        assert (await service.progress()).phase == "starting", "it can be resumed"


def test_parked_tasks_are_not_an_error_while_other_tasks_remain() -> None:
    parked = {TaskId("a"): "no image", TaskId("b"): "no network"}
    refuse_all_parked(parked, tasks=3, step=2)
    with pytest.raises(TasksParked, match=r"after 2 steps: 2 tasks are parked, last b: no network; .*new run") as end:
        refuse_all_parked(parked, tasks=2, step=2)
    assert str(pickle.loads(pickle.dumps(end.value))) == str(end.value)
