"""What a look at all parts of a run records, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.record.files.metrics import MetricsLog, read_metrics
from headrace.actors.record.files.service_totals import ServiceTotals
from headrace.actors.rollouts.dispatcher import DispatcherStatus
from headrace.actors.rollouts.worker import WorkerStatus
from headrace.actors.run.config import load_recipe
from headrace.actors.run.parts import supervised_actors
from headrace.actors.run.service import Service
from headrace.actors.run.supervision import RECORD_S, StatusSnapshot, Supervision
from headrace.actors.runtime.actors.runtime import InlineRuntime
from headrace.actors.runtime.simulated.durations import DurationsConfig
from headrace.actors.services.figures import ServiceFigures
from headrace.actors.simulation.virtual.plan import SimulationPlan
from headrace.actors.simulation.virtual.plan_service import open_service
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from support.run_rig import RECIPE

SHORT = DurationsConfig(mean_s=5.0, median_s=5.0, cap_s=10.0)
PLAN = SimulationPlan(slots=8, batch_size=8, group_size=4, durations=SHORT, evaluate_s=300.0, learner_s=1.0)


@pytest.fixture
def watched(tmp_path: Path) -> Any:
    """`watched(beginnings)`: the stations records of ten minutes beside these calls of a service."""
    recipe = RECIPE.with_name("simulated.toml")
    path = tmp_path / "metrics.jsonl"

    async def watch(begin: Callable[[Service], list[Any]]) -> None:
        runtime, config = InlineRuntime(), load_recipe(recipe, (), tmp_path)
        clock = asyncio.get_running_loop().time
        async with open_service(PLAN, runtime, clock=clock) as service, asyncio.TaskGroup() as tasks:
            supervision = Supervision(
                config, runtime, MetricsLog(path), supervised_actors(service.actors, service.actors.learner)
            )
            running = [tasks.create_task(call) for call in begin(service)]
            for _ in range(600):
                await asyncio.sleep(1.0)
                await supervision.check()
            for task in running:
                task.cancel()

    def watched(begin: Callable[[Service], list[Any]]) -> list[dict[str, Any]]:
        run_virtual(watch(begin))
        return [record for record in read_metrics(path) if record["kind"] == "stations"]

    return watched


def test_records_contain_the_rollouts_in_flight_and_the_phase_lock(watched: Any) -> None:
    records = watched(lambda service: [service.actors.dispatcher.run(), service.actors.learner.run()])
    locked = records[3:25]
    assert {record["held_up_by"] for record in locked} == {"evaluator"}
    assert [record["in_flight"] for record in locked] == pytest.approx([8.0] * 22)


def test_evaluation_rollouts_count_as_ended(watched: Any) -> None:
    """Their time in the evaluator is in the figures: with none of them ended there would be none."""
    records = watched(
        lambda service: [
            service.actors.learner.open(),
            service.actors.dispatcher.evaluate(PLAN.task_set()[:40], samples=1, tag="base"),
        ]
    )
    times = [record["stations"]["evaluator"]["mean_s"] for record in records]
    assert [time for time in times if time is not None]


def test_the_services_of_all_workers_are_recorded_as_stations_and_totals(tmp_path: Path) -> None:
    """F14: a service that most rollouts wait for is named, though the sandboxes are full of them."""
    config = load_recipe(RECIPE.with_name("simulated.toml"), (), tmp_path)
    path = tmp_path / "metrics.jsonl"

    def status(second: int) -> StatusSnapshot:
        user = ServiceFigures(totals=ServiceTotals(calls=2 * second, cost=second / 10), limit=8, in_flight=3, waiting=1)
        worker = WorkerStatus(incarnation="a", assignment="", running=4, phases={}, services={"user": user})
        workers = (worker, replace(worker, incarnation="b"))
        dispatcher = DispatcherStatus(
            in_flight=10, evaluating=0, finished=second, scored=0, answered=0, infra=0, mean_reward=None
        )
        parts: dict[str, Any] = dict.fromkeys(("learner", "pool", "gateway", "judged_steps"))
        return StatusSnapshot(**parts, dispatcher=dispatcher, workers=workers, engines=())

    async def watch() -> None:
        runtime, clock = InlineRuntime(), asyncio.get_running_loop().time
        async with open_service(PLAN, runtime, clock=clock) as service:
            actors = supervised_actors(service.actors, service.actors.learner)
            supervision = Supervision(config, runtime, MetricsLog(path), actors)
            for second in range(11):
                await supervision._measure(status(second), RECORD_S)
                await asyncio.sleep(1.0)

    run_virtual(watch())
    stations, services = read_metrics(path, ("stations", "services"))
    assert stations["stations"]["service.user"] == {"in_use": 8.0, "capacity": 16.0, "mean_s": 8.0}
    assert stations["held_up_by"] == "service.user"
    assert services["services"]["user"]["calls"] == 40
    assert services["services"]["user"]["cost"] == pytest.approx(2.0)


def test_the_last_figures_are_recorded_when_the_run_ends(tmp_path: Path) -> None:
    """F14: a run of thirteen seconds has all of them in its report, not only those of its first ten."""
    config = load_recipe(RECIPE.with_name("simulated.toml"), (), tmp_path)
    path = tmp_path / "metrics.jsonl"

    async def watch() -> None:
        runtime, clock = InlineRuntime(), asyncio.get_running_loop().time
        async with open_service(PLAN, runtime, clock=clock) as service, asyncio.TaskGroup() as tasks:
            supervision = Supervision(
                config, runtime, MetricsLog(path), supervised_actors(service.actors, service.actors.learner)
            )
            running = [
                tasks.create_task(call) for call in (service.actors.dispatcher.run(), service.actors.learner.run())
            ]
            for _ in range(13):
                await supervision.check()
                await asyncio.sleep(1.0)
            await supervision.finish()
            for task in running:
                task.cancel()

    run_virtual(watch())
    records = read_metrics(path, ("stations",))
    assert [round(record["seconds"]) for record in records] == [10, 3]


def test_a_run_records_its_last_figures_by_itself(tmp_path: Path) -> None:
    """Supervision looks every ten minutes here, and the run is over before its first look."""
    path = tmp_path / "metrics.jsonl"

    async def play() -> None:
        runtime, clock = InlineRuntime(), asyncio.get_running_loop().time
        plan = PLAN.model_copy(update={"steps": 2, "evaluate_s": 1.0})
        async with open_service(plan, runtime, clock=clock) as service:
            service._supervision._metrics = MetricsLog(path)
            await service._supervision.check()
            assert await service.run()

    run_virtual(play())
    [stations] = read_metrics(path, ("stations",))
    assert stations["seconds"] > 0
    assert "learner" in stations["stations"]
