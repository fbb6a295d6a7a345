"""Work that several calls share: one runs, all get its end, and a dead caller's does not stop it."""

from __future__ import annotations

import asyncio

import pytest

from headrace.actors.errors import ConfigError
from headrace.serve.gateway.joining import Joined


class Steps:
    """Counts how often it runs; ends when told."""

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
    steps = Steps()
    async with asyncio.TaskGroup() as tasks:
        joined: Joined[int] = Joined(tasks)
        first = tasks.create_task(joined("train", steps))
        second = tasks.create_task(joined("train", steps))
        await steps.running.wait()
        steps.may_end.set()
    assert (first.result(), second.result(), steps.runs) == (1, 1, 1)
    async with asyncio.TaskGroup() as tasks:
        assert await Joined[int](tasks)("train", steps) == 2, "what has ended may run again"


async def test_it_goes_on_until_the_last_caller_leaves() -> None:
    steps = Steps()
    async with asyncio.TaskGroup() as tasks:
        joined: Joined[int] = Joined(tasks)
        first = tasks.create_task(joined("train", steps))
        second = tasks.create_task(joined("train", steps))
        await steps.running.wait()
        first.cancel()
        await asyncio.wait([first])
        assert steps.cancelled == 0
        second.cancel()
    assert (steps.runs, steps.cancelled) == (1, 1)


async def test_who_comes_while_it_is_being_left_waits_and_starts_anew() -> None:
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
        joined: Joined[int] = Joined(tasks)
        first = tasks.create_task(joined("train", work))
        await running.wait()
        first.cancel()
        await ending.wait()
        second = tasks.create_task(joined("train", work))
        await asyncio.wait([first])
        assert len(runs) == 1
        may_end.set()
    assert (second.result(), runs) == (2, [False, True])


async def test_it_can_be_ended_for_all_callers() -> None:
    steps = Steps()
    async with asyncio.TaskGroup() as tasks:
        joined: Joined[int] = Joined(tasks)
        caller = tasks.create_task(joined("train", steps))
        await steps.running.wait()
        joined.cancel("evaluate")
        joined.cancel("train")
    assert caller.cancelled()
    assert steps.cancelled == 1


async def test_an_error_reaches_every_caller_and_nothing_else() -> None:
    async def fail() -> int:
        raise ConfigError("no")

    async with asyncio.TaskGroup() as tasks:
        joined: Joined[int] = Joined(tasks)
        for _ in range(2):
            with pytest.raises(ConfigError):
                await joined("train", fail)
        steps = Steps()
        steps.may_end.set()
        assert await joined("evaluate", steps) == 1
