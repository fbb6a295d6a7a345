"""Single flight: concurrent calls share one run, which survives until its last caller is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from headrace.actors.errors import ConfigError
from headrace.buffer.primitives.single_flight import SingleFlight


class Steps:
    """Counts how often it runs; ends when `may_end` is set."""

    def __init__(self) -> None:
        self.runs = 0
        self.cancelled = 0
        self.running = asyncio.Event()
        self.may_end = asyncio.Event()

    async def __call__(self) -> int:
        self.runs += 1
        self.running.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.runs


async def test_calls_for_one_key_share_one_run() -> None:
    """F11."""
    steps = Steps()
    async with asyncio.TaskGroup() as tasks:
        flights: SingleFlight[int] = SingleFlight(tasks)
        first = tasks.create_task(flights("train", steps))
        second = tasks.create_task(flights("train", steps))
        await steps.running.wait()
        steps.may_end.set()
    assert (first.result(), second.result(), steps.runs) == (1, 1, 1)
    async with asyncio.TaskGroup() as tasks:
        assert await SingleFlight[int](tasks)("train", steps) == 2, "a key whose run has ended may run again"


async def test_a_run_continues_until_its_last_caller_is_cancelled() -> None:
    steps = Steps()
    async with asyncio.TaskGroup() as tasks:
        flights: SingleFlight[int] = SingleFlight(tasks)
        first = tasks.create_task(flights("train", steps))
        second = tasks.create_task(flights("train", steps))
        await steps.running.wait()
        first.cancel()
        await asyncio.wait([first])
        assert steps.cancelled == 0
        second.cancel()
    assert (steps.runs, steps.cancelled) == (1, 1)


async def test_a_call_during_the_end_of_an_abandoned_run_starts_a_new_run() -> None:
    running, ending, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
    runs = []

    async def work() -> int:
        runs.append(ending.is_set())
        running.set()
        if len(runs) > 1:
            return len(runs)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            ending.set()
            await may_end.wait()
        return 0

    async with asyncio.TaskGroup() as tasks:
        flights: SingleFlight[int] = SingleFlight(tasks)
        first = tasks.create_task(flights("train", work))
        await running.wait()
        first.cancel()
        await ending.wait()
        second = tasks.create_task(flights("train", work))
        await asyncio.wait([first])
        assert len(runs) == 1
        may_end.set()
    assert (second.result(), runs) == (2, [False, True])


async def test_cancel_ends_the_run_for_all_callers() -> None:
    steps = Steps()
    async with asyncio.TaskGroup() as tasks:
        flights: SingleFlight[int] = SingleFlight(tasks)
        caller = tasks.create_task(flights("train", steps))
        await steps.running.wait()
        flights.cancel("evaluate")
        flights.cancel("train")
    assert caller.cancelled()
    assert steps.cancelled == 1


async def test_an_error_is_raised_to_every_caller_and_affects_no_other_key() -> None:
    async def fail() -> int:
        raise ConfigError("no")

    async with asyncio.TaskGroup() as tasks:
        flights: SingleFlight[int] = SingleFlight(tasks)
        for _ in range(2):
            with pytest.raises(ConfigError):
                await flights("train", fail)
        steps = Steps()
        steps.may_end.set()
        assert await flights("evaluate", steps) == 1
