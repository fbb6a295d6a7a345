"""The inline runtime, the batcher and the retry table: plain asyncio, no Ray."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from typing import ClassVar, Self

import pytest

from headrace.actors.errors import ActorGone, ActorLost, ConfigError
from headrace.actors.runtime.actors.batching import Batcher
from headrace.actors.runtime.actors.operations import (
    ABSENCE,
    NO_ATTEMPTS,
    Attempts,
    OperationCalls,
    Operations,
    Results,
    until_back,
)
from headrace.actors.runtime.actors.runtime import Host, InlineRuntime, require_async


class Opened:
    """Records its life."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    async def __aenter__(self) -> Self:
        self._log.append("enter")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._log.append("exit")

    async def work(self) -> str:
        self._log.append("work")
        return "done"


class Synchronous:
    def work(self) -> None: ...


class WithProperty:
    @property
    def size(self) -> int:
        return 1


async def test_an_inline_actor_is_the_instance_itself_entered_and_exited() -> None:
    runtime, log = InlineRuntime(), list[str]()
    actor = await runtime.spawn(Opened, log, name="opened")
    assert isinstance(actor, Opened)
    assert await actor.work() == "done"
    await runtime.stop(actor)
    await runtime.stop(actor)
    assert log == ["enter", "work", "exit"]


@pytest.mark.parametrize("cls", [Synchronous, WithProperty])
def test_only_classes_with_async_methods_may_be_spawned(cls: type[object]) -> None:
    with pytest.raises(TypeError, match="async"):
        require_async(cls)


async def test_requests_in_one_window_are_sent_together() -> None:
    calls: list[list[int]] = []

    async def double(requests: list[int]) -> Sequence[int | Exception]:
        calls.append(requests)
        return [ConfigError("odd") if request % 2 else 2 * request for request in requests]

    async with Batcher(double) as batcher:
        results = await asyncio.gather(*(batcher(number) for number in range(4)), return_exceptions=True)
    assert calls == [[0, 1, 2, 3]]
    assert results[0] == 0
    assert results[2] == 4
    assert isinstance(results[1], ConfigError)


async def test_a_failing_call_fails_all_requests_in_its_batch_and_no_others() -> None:
    async def fail_once(requests: list[int]) -> Sequence[int | Exception]:
        if 1 in requests:
            raise ActorLost("gone")
        return requests

    async with Batcher(fail_once) as batcher:
        first = await asyncio.gather(batcher(1), batcher(2), return_exceptions=True)
        assert [type(result) for result in first] == [ActorLost, ActorLost]
        assert await batcher(3) == 3


async def test_a_cancelled_request_does_not_affect_its_batch() -> None:
    seen: list[list[int]] = []

    async def echo(requests: list[int]) -> Sequence[int | Exception]:
        seen.append(requests)
        return requests

    async with Batcher(echo) as batcher:
        gone = asyncio.ensure_future(batcher(1))
        stays = asyncio.ensure_future(batcher(2))
        await asyncio.sleep(0)
        gone.cancel()
        assert await stays == 2
    assert seen == [[2]]


async def test_idempotent_calls_are_repeated_after_a_restart_but_not_after_other_errors() -> None:
    attempts = 0

    async def flaky() -> int:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise ActorLost("restarting")
        return attempts

    async def broken() -> int:
        raise ConfigError("no")

    assert await until_back(flaky) == 3
    with pytest.raises(ConfigError):
        await until_back(broken)


async def test_an_actor_that_stays_lost_is_reported_gone() -> None:
    async def gone() -> int:
        raise ActorLost("gone")

    with pytest.raises(ActorGone, match="gone"):
        await until_back(gone, deadline_s=0.2)


async def test_a_long_call_that_was_lost_is_repeated() -> None:
    calls = 0

    async def long_running() -> str:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.sleep(0.3)
            raise ActorLost("died at the end")
        return "done"

    assert await until_back(long_running, deadline_s=0.2) == "done"


class FailsOnce:
    """Its first entering fails."""

    tried: ClassVar[asyncio.Event]

    async def __aenter__(self) -> Self:
        if not self.tried.is_set():
            self.tried.set()
            raise OSError("the address is in use")
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def work(self) -> str:
        return "done"


async def test_the_next_call_retries_entering_an_actor_that_failed_to_enter() -> None:
    FailsOnce.tried = asyncio.Event()
    host = Host(pickle.dumps((ABSENCE.seconds, None, "host", FailsOnce, (), {})))
    await host.stats(begin=True)
    await FailsOnce.tried.wait()
    await host.stats(begin=True)
    assert await host.call("1", "work", (), {}) == "done"
    await host.close()


class Kitchen:
    """Operations that end when they are told."""

    def __init__(self, orders: int = 1) -> None:
        self.orders = orders
        self.busy = asyncio.Event()
        self.left = asyncio.Event()
        self.begun: list[str] = []
        self.given_back: list[str] = []
        self.calls = 0
        self.lost_calls = 0
        self.lost = asyncio.Event()
        self.gates: dict[str, asyncio.Event] = {}

    async def cook(self, dish: str) -> str:
        self.begun.append(dish)
        gate = self.gates.setdefault(dish, asyncio.Event())
        if len(self.begun) == self.orders:
            self.busy.set()
        try:
            await gate.wait()
        except asyncio.CancelledError:
            self.left.set()
            raise
        if dish == "burnt":
            raise ValueError(dish)
        return f"hot {dish}"

    async def give_back(self, dish: str) -> None:
        self.given_back.append(dish)


class Waiter(Operations[str, str]):
    """An actor's side that counts its calls, and loses some."""

    def __init__(self, kitchen: Kitchen) -> None:
        super().__init__(kitchen.cook, unclaimed=kitchen.give_back)
        self.kitchen = kitchen

    async def fetch(self, keys: list[str]) -> Results[str]:
        self.kitchen.calls += 1
        if self.kitchen.lost_calls:
            self.kitchen.lost_calls -= 1
            self.kitchen.lost.set()
            raise ActorLost("restarting")
        return await super().fetch(keys)


async def test_operations_do_not_wait_for_the_slowest_one() -> None:
    kitchen = Kitchen(3)
    async with Waiter(kitchen) as waiter, OperationCalls(waiter, unclaimed=kitchen.give_back) as order:
        tasks = {dish: asyncio.create_task(order(dish, dish)) for dish in ("soup", "burnt", "stew")}
        await kitchen.busy.wait()
        kitchen.gates["soup"].set()
        assert await tasks["soup"] == "hot soup"
        kitchen.gates["burnt"].set()
        with pytest.raises(ValueError, match="burnt"):
            await tasks["burnt"]
        assert not tasks["stew"].done()
        kitchen.gates["stew"].set()
        assert await tasks["stew"] == "hot stew"
        assert kitchen.begun == ["soup", "burnt", "stew"]
        assert kitchen.calls <= 4


async def test_cancelled_operations_are_withdrawn() -> None:
    kitchen = Kitchen(2)
    async with Waiter(kitchen) as waiter, OperationCalls(waiter, unclaimed=kitchen.give_back) as order:
        tasks = [asyncio.create_task(order(dish, dish)) for dish in ("soup", "stew")]
        await kitchen.busy.wait()
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        kitchen.gates["stew"].set()
        assert await tasks[1] == "hot stew"
        await kitchen.left.wait()
        assert (await waiter.fetch(["soup"])).unknown == ("soup",)


async def test_operations_on_a_lost_actor_are_started_again() -> None:
    kitchen = Kitchen()
    kitchen.lost_calls = 1
    async with Waiter(kitchen) as waiter, OperationCalls(waiter, unclaimed=kitchen.give_back) as order:
        task = asyncio.create_task(order("soup", "soup"))
        await kitchen.lost.wait()
        await waiter.withdraw(["soup"])
        kitchen.gates["soup"].set()
        assert await task == "hot soup"


async def test_a_result_arriving_in_the_same_loop_iteration_as_the_cancellation_is_released() -> None:
    kitchen = Kitchen()

    class Late(Waiter):
        async def begin(self, requests: dict[str, str], attempts: Attempts = NO_ATTEMPTS) -> Results[str]:
            # Runs after the answer is set and before whoever waits for it.
            asyncio.get_running_loop().call_soon(gone.cancel)
            return Results(ready={key: f"hot {dish}" for key, dish in requests.items()})

    async with Late(kitchen) as waiter, OperationCalls(waiter, unclaimed=kitchen.give_back) as order:
        gone = asyncio.create_task(order("soup", "soup"))
        with pytest.raises(asyncio.CancelledError):
            await gone
    assert kitchen.given_back == ["hot soup"]


async def test_a_result_for_a_cancelled_request_is_released() -> None:
    kitchen = Kitchen(2)
    fetching, answered, may_travel = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(Waiter):
        async def fetch(self, keys: list[str]) -> Results[str]:
            fetching.set()
            results = await super().fetch(keys)
            answered.set()
            await may_travel.wait()
            return results

    async with Slow(kitchen) as waiter, OperationCalls(waiter, unclaimed=kitchen.give_back) as order:
        gone, stays = (asyncio.create_task(order(dish, dish)) for dish in ("soup", "stew"))
        await fetching.wait()
        for gate in kitchen.gates.values():
            gate.set()
        await answered.wait()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        may_travel.set()
        assert await stays == "hot stew"
    assert kitchen.given_back == ["hot soup"]


async def test_a_result_that_is_never_fetched_is_released() -> None:
    kitchen = Kitchen()
    kitchen.gates["soup"] = asyncio.Event()
    kitchen.gates["soup"].set()
    async with Waiter(kitchen) as waiter:
        waiter._running["key"] = asyncio.create_task(waiter._run("soup"))
        await asyncio.wait([waiter._running["key"]])
        await waiter.withdraw(["key"])
    assert kitchen.given_back == ["hot soup"]
