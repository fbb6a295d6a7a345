"""Faults at the boundary between actors, in virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from typing import Self

import pytest

from headrace.actors.errors import ActorGone, ActorLost
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import end_actor
from headrace.actors.simulation.virtual.faulty_runtime import NO_FAULTS, CallFaults, FaultyRuntime
from headrace.actors.simulation.virtual.virtual_time import run_virtual

DISK: dict[str, int] = {}


class Counter:
    """Counts on disk what it was told, and in memory what this life of it was told."""

    def __init__(self, name: str = "count") -> None:
        self._name = name
        self._told = 0

    async def __aenter__(self) -> Self:
        DISK.setdefault(self._name, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        DISK["closed"] = DISK.get("closed", 0) + 1

    async def add(self) -> int:
        DISK[self._name] += 1
        self._told += 1
        return self._told

    async def sleep(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.sleep(0)
            DISK["cleaned"] = 1
        return "slept"

    async def fail(self) -> None:
        raise ValueError("as it was raised")

    async def end(self) -> None:
        end_actor()


class Teller:
    """Tells a counter again and again."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    async def tell(self, times: int, every_s: float) -> None:
        for _ in range(times):
            await asyncio.sleep(every_s)
            await self._counter.add()


def simulate(history, faults: CallFaults = NO_FAULTS, seed: int = 0):
    DISK.clear()
    events: list[tuple[str, str, str]] = []

    async def main() -> object:
        chance = random.Random(seed)
        async with FaultyRuntime(faults, chance, lambda *event: events.append(event)) as runtime:
            return await history(runtime)

    return run_virtual(main()), events


def test_results_and_errors_are_copied_to_the_caller() -> None:
    async def history(runtime: FaultyRuntime) -> None:
        counter = await runtime.spawn(Counter, name="counter")
        assert [await counter.add(), await counter.add()] == [1, 2]
        with pytest.raises(ValueError, match="as it was raised"):
            await counter.fail()
        await runtime.stop(counter)
        assert DISK == {"count": 2, "closed": 1}
        with pytest.raises(ActorGone):
            await counter.add()

    simulate(history)


def test_a_killed_actor_has_no_further_effect_and_restarts_from_disk() -> None:
    async def history(runtime: FaultyRuntime) -> None:
        counter = await runtime.spawn(Counter, name="counter")
        await counter.add()
        async with asyncio.TaskGroup() as tasks:
            sleeping = tasks.create_task(suppressed(counter.sleep(50.0)))
            await asyncio.sleep(1.0)
            runtime.cells["counter"].kill("test")
            with pytest.raises(ActorLost):
                await counter.add()
        assert sleeping.result() == "ActorLost"
        assert await until_back(counter.add) == 1, "its memory is gone"
        assert DISK["count"] == 2
        assert (await runtime.stats(counter))[0] == 2

    simulate(history)


async def suppressed(call) -> str:
    try:
        return await call
    except (ActorLost, ValueError) as error:
        return type(error).__name__


def test_calls_of_a_dead_caller_are_not_delivered() -> None:
    async def history(runtime: FaultyRuntime) -> None:
        counter = await runtime.spawn(Counter, name="counter")
        teller = await runtime.spawn(Teller, counter, name="teller")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(suppressed(teller.tell(10, 1.0)))
            await asyncio.sleep(3.5)
            runtime.cells["teller"].kill("test")
        await asyncio.sleep(100.0)
        assert DISK["count"] == 3

    simulate(history)


def test_an_actor_that_ends_itself_is_restarted() -> None:
    async def history(runtime: FaultyRuntime) -> None:
        counter = await runtime.spawn(Counter, name="counter")
        await counter.add()
        with pytest.raises(ActorLost):
            await counter.end()
        assert await until_back(counter.add) == 1

    _, events = simulate(history)
    assert ("died", "counter", "it ended itself") in events


class Exiting:
    """Its task group fails, and its exit takes a while."""

    async def __aenter__(self) -> Self:
        self._stack = AsyncExitStack()
        self._stack.push_async_callback(asyncio.sleep, 5.0)
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def work(self, *, fails: bool = False) -> None:
        async def work() -> None:
            if fails:
                raise OSError("the disk is full")

        working = work()
        try:
            self._tasks.create_task(working)
        except RuntimeError:
            working.close()
            raise


def test_a_call_to_an_actor_whose_background_task_failed_is_lost_and_not_an_error() -> None:
    async def history(runtime: FaultyRuntime) -> None:
        exiting = await runtime.spawn(Exiting, name="exiting")
        await exiting.work(fails=True)
        await asyncio.sleep(1.0)
        with pytest.raises(ActorLost, match="TaskGroup"):
            await exiting.work()
        await until_back(exiting.work)

    simulate(history)


def test_lossy_calls_are_lost_and_repeated_at_the_configured_rates() -> None:
    faults = CallFaults(delay_s=0.01, slow=0.0, slow_s=5.0, lost=0.1, answer_lost=0.1, repeated=0.1)

    async def history(runtime: FaultyRuntime) -> tuple[int, int]:
        counter = await runtime.spawn(Counter, name="counter")
        answered = 0
        for _ in range(300):
            with suppress(ActorLost):
                await counter.add()
                answered += 1
        await asyncio.sleep(10.0)
        return answered, DISK["count"]

    (answered, counted), events = simulate(history, faults)
    kinds = [kind for kind, _, _ in events]
    lost, unanswered, repeated = (kinds.count(kind) for kind in ("lost", "answer lost", "repeated"))
    assert min(lost, unanswered, repeated) > 10
    assert answered == 300 - lost - unanswered
    assert counted == 300 - lost + repeated


def test_the_same_seed_gives_the_same_history() -> None:
    faults = CallFaults(delay_s=0.5, slow=0.1, lost=0.05, answer_lost=0.05, repeated=0.05, restart_s=2.0)

    async def history(runtime: FaultyRuntime) -> list[object]:
        counters = [await runtime.spawn(Counter, f"count-{n}", name=f"counter-{n}") for n in range(3)]
        tellers = [await runtime.spawn(Teller, counter, name=f"teller-{n}") for n, counter in enumerate(counters)]
        async with asyncio.TaskGroup() as tasks:
            told = [tasks.create_task(suppressed(teller.tell(40, 0.3))) for teller in tellers]
            for _ in range(5):
                await asyncio.sleep(runtime.chance.uniform(0, 5))
                runtime.cells[runtime.chance.choice(sorted(runtime.cells))].kill("test")
        return [*(task.result() for task in told), dict(DISK), asyncio.get_running_loop().time()]

    first, second, third = (simulate(history, faults, seed) for seed in (1, 1, 2))
    assert first == second
    assert first != third


def test_a_partitioned_actor_is_unreachable_until_it_is_reconnected() -> None:
    async def history(runtime: FaultyRuntime) -> None:
        counter = await runtime.spawn(Counter, name="counter")
        runtime.cut_off.add("counter")
        with pytest.raises(ActorLost):
            await counter.add()
        runtime.cut_off.clear()
        assert await counter.add() == 1

    simulate(history)


def test_the_death_of_the_driver_kills_all_actors() -> None:
    async def history(runtime: FaultyRuntime) -> None:
        counter = await runtime.spawn(Counter, name="counter")
        teller = await runtime.spawn(Teller, counter, name="teller")
        async with asyncio.TaskGroup() as tasks:
            told = tasks.create_task(suppressed(teller.tell(10, 1.0)))
            await asyncio.sleep(2.5)
            await runtime.kill_all()
        assert told.result() == "ActorLost"
        await asyncio.sleep(100.0)
        assert DISK["count"] == 2
        assert len(asyncio.all_tasks()) == 1

    simulate(history)
