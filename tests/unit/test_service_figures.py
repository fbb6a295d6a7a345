"""Sums of the workers' figures, and the time of a rollout in services."""

from __future__ import annotations

import asyncio

from headrace.actors.record.files.service_totals import ServiceTotals
from headrace.actors.services.figures import FiguresSum, ServiceFigures, ServiceTime, current_service_time, service_time


def figures(calls: int, cost: float = 0.0) -> dict[str, ServiceFigures]:
    return {"it": ServiceFigures(totals=ServiceTotals(calls=calls, cost=cost), limit=4, in_flight=2)}


def test_a_restarted_worker_begins_at_zero_and_nothing_is_counted_twice() -> None:
    summed = FiguresSum()
    summed.add("first", figures(5, 1.0))
    summed.add("first", figures(7, 1.5))
    summed.add("other", figures(10))
    summed.add("second life of the first", figures(3, 0.5))
    assert summed.take() == {"it": ServiceTotals(calls=20, cost=2.0)}
    summed.add("other", figures(11))
    assert summed.take() == {"it": ServiceTotals(calls=1)}
    assert summed.take() == {}


def test_calls_that_overlap_count_once() -> None:
    now = 0.0
    measured = ServiceTime(clock=lambda: now)
    with measured.within("a"):
        now = 1.0
        with measured.within("a"), measured.within("b"):
            now = 3.0
        now = 4.0
    with measured.within("a"):
        now = 5.0
    assert measured.seconds == {"a": 5.0, "b": 2.0}


async def test_each_rollout_has_the_time_of_its_own_tasks() -> None:
    async def call(name: str) -> None:
        with current_service_time().within(name):
            await asyncio.sleep(0)

    async def rollout(name: str) -> dict[str, float]:
        with service_time() as measured:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(call(name))
                tasks.create_task(call("shared"))
        return measured.seconds

    first, second = await asyncio.gather(rollout("a"), rollout("b"))
    assert first.keys() == {"a", "shared"}
    assert second.keys() == {"b", "shared"}
    await call("nobody's")
