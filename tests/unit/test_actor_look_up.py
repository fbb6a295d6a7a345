"""The look-up of an actor by its name while Ray's call blocks, as it does without a head."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.actors.errors import ActorLost, ActorMissing
from headrace.actors.runtime.actors.runtime import ActorProxy


class LookUps:
    """In place of Ray's look-up: counts calls, which block until `answer` is set."""

    def __init__(self) -> None:
        self.count = 0
        self.answer = threading.Event()
        self.error: Exception | None = None

    def __call__(self, name: str, namespace: str | None) -> object:
        self.count += 1
        self.answer.wait()
        if self.error is not None:
            raise self.error
        return object()


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> LookUps:
    look_ups = LookUps()
    monkeypatch.setattr("ray.get_actor", look_ups)
    return look_ups


async def test_a_blocked_look_up_is_shared_and_may_be_given_up(look_ups: LookUps) -> None:
    runs = ActorProxy("runs")
    waiting = [asyncio.create_task(runs._resolved()) for _ in range(20)]
    for _ in range(2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await runs._resolved()
    assert look_ups.count == 1
    look_ups.answer.set()
    assert len(set(await asyncio.gather(*waiting))) == 1
    assert look_ups.count == 1


async def test_a_handle_is_kept_until_it_is_forgotten(look_ups: LookUps) -> None:
    look_ups.answer.set()
    runs = ActorProxy("runs")
    first = await runs._resolved()
    assert await runs._resolved() is first
    runs._forget(first)
    assert await runs._resolved() is not first
    assert look_ups.count == 2


async def test_an_actor_that_is_not_found_is_looked_up_again(look_ups: LookUps) -> None:
    from ray.exceptions import RpcError

    look_ups.answer.set()
    runs = ActorProxy("runs")
    for raised, error in ((ValueError("no such actor"), ActorMissing), (RpcError("gone"), ActorLost)):
        look_ups.error = raised
        with pytest.raises(error, match="runs"):
            await runs._resolved()
    look_ups.error = None
    await runs._resolved()


def test_a_proxy_is_used_in_one_loop_after_another(look_ups: LookUps) -> None:
    """A command that asks twice has two."""
    runs = ActorProxy("runs")

    async def given_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await runs._resolved()

    asyncio.run(given_up())
    look_ups.answer.set()
    assert asyncio.run(runs._resolved()) is not None
