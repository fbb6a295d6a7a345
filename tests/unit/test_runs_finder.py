"""The finder of the actor of runs while Ray's look-up blocks, as it does without a head."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.actors.cluster.api import finder
from headrace.actors.cluster.api.finder import RunsFinder
from headrace.actors.errors import ActorLost, RunsMissing


class LookUps:
    """Counts look-ups, which block until `answer` is set."""

    def __init__(self) -> None:
        self.count = 0
        self.answer = threading.Event()
        self.error: Exception | None = None

    def __call__(self) -> object:
        self.count += 1
        self.answer.wait()
        if self.error is not None:
            raise self.error
        return object()


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> LookUps:
    monkeypatch.setattr(finder, "LOOK_UP_S", 0.05)
    return LookUps()


async def test_a_blocked_look_up_is_shared_and_given_up_in_time(
    look_ups: LookUps, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = RunsFinder(look_ups)
    results = await asyncio.gather(*(find() for _ in range(20)), return_exceptions=True)
    assert all(isinstance(result, ActorLost) for result in results)
    with pytest.raises(ActorLost, match="does not answer"):
        await find()
    assert look_ups.count == 1
    look_ups.answer.set()
    monkeypatch.setattr(finder, "LOOK_UP_S", 30.0)
    assert await find() is await find()
    assert look_ups.count <= 2


async def test_a_handle_is_kept_until_it_is_forgotten(look_ups: LookUps, monkeypatch: pytest.MonkeyPatch) -> None:
    look_ups.answer.set()
    monkeypatch.setattr(finder, "LOOK_UP_S", 30.0)
    find = RunsFinder(look_ups)
    first = await find()
    assert await find() is first
    find.forget()
    assert await find() is not first
    assert look_ups.count == 2


async def test_a_cluster_without_the_actor_is_asked_again(look_ups: LookUps, monkeypatch: pytest.MonkeyPatch) -> None:
    look_ups.answer.set()
    monkeypatch.setattr(finder, "LOOK_UP_S", 30.0)
    look_ups.error = ValueError("no such actor")
    find = RunsFinder(look_ups)
    with pytest.raises(RunsMissing, match="start it with"):
        await find()
    look_ups.error = None
    await find()
