"""Budgets of request bodies: who is refused, who waits, and who goes first."""

from __future__ import annotations

import asyncio

import pytest

from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.errors import TooManyRequests
from headrace.serve.gateway.http.body_budget import BodyBudget

A, B, C, D = (SessionId(name) for name in "abcd")
TOTAL = 100


async def test_the_bodies_of_a_session_share_its_budget_until_they_are_released() -> None:
    budget = BodyBudget(session_bytes=100, total_bytes=1000)
    with budget.hold(A) as first:
        await first.add(60)
        with budget.hold(A) as second:
            with pytest.raises(TooManyRequests, match="100 bytes together"):
                await second.add(41)
            await second.add(40)
            with pytest.raises(TooManyRequests):
                await first.add(1)
        with budget.hold(B) as other:
            await other.add(100)
        await first.add(40)
        assert budget.total == 100
    assert budget.total == 0


class Crowd:
    """Bodies of a gateway with room for `TOTAL` bytes. `admitted` are their names, in the order of their admission;
    each is held until it is told to end."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.budget = BodyBudget(session_bytes=1000, total_bytes=TOTAL)
        self.admitted: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group = group

    async def begin(self, name: str, session: SessionId, *numbers: int) -> None:
        """Begin a body, of which pieces of these sizes arrive."""
        began, end = asyncio.Event(), asyncio.Event()

        async def body() -> None:
            with self.budget.hold(session) as held:
                began.set()
                for number in numbers:
                    await held.add(number)
                self.admitted.append(name)
                await end.wait()

        self._ends[name], self._tasks[name] = end, self._group.create_task(body())
        await began.wait()

    async def end(self, name: str) -> None:
        """End a body, and wait until those have been admitted that have room now."""
        self._ends[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait({self._tasks[name]})


async def test_bodies_wait_for_room_and_the_session_with_the_fewest_bytes_goes_first() -> None:
    async with asyncio.TaskGroup() as group:
        crowd = Crowd(group)
        await crowd.begin("full", SessionId("full"), TOTAL)
        await crowd.begin("beyond", SessionId("beyond"), 1)
        for name, session, number in (("b1", B, 30), ("c", C, 50), ("b2", B, 15), ("d", D, 20), ("a", A, 20)):
            await crowd.begin(name, session, number)
        assert crowd.admitted == ["full", "beyond"]
        await crowd.end("full")
        assert crowd.admitted == ["full", "beyond", "d", "a", "b1", "b2"], "there is no room for c"
        for name in ("beyond", "d", "a", "b1", "b2", "c"):
            await crowd.end(name)
    assert crowd.admitted[-1] == "c"
    assert crowd.budget.total == 0


async def test_bodies_that_wait_for_each_other_go_on_one_by_one() -> None:
    async with asyncio.TaskGroup() as group:
        crowd = Crowd(group)
        for name, session in (("a", A), ("b", B), ("c", C)):
            await crowd.begin(name, session, 30, 30)
        await crowd.begin("d", D, 30, 30)
        assert (crowd.admitted, crowd.budget.total) == (["a", "b"], 120), "b goes beyond the budget"
        await crowd.end("b")
        assert len(crowd.admitted) == 3, "one of c and d does"
        assert crowd.budget.total <= TOTAL + 60
        await crowd.end(crowd.admitted[-1])
        assert set(crowd.admitted) == {"a", "b", "c", "d"}
        for name in {"a", "c", "d"} - {crowd.admitted[2]}:
            await crowd.end(name)
    assert crowd.budget.total == 0


async def test_a_body_that_is_given_up_while_it_waits_holds_nothing() -> None:
    async with asyncio.TaskGroup() as group:
        crowd = Crowd(group)
        await crowd.begin("full", SessionId("full"), TOTAL)
        await crowd.begin("beyond", SessionId("beyond"), 1)
        await crowd.begin("left", A, 10)
        await crowd.begin("patient", B, 20)
        await crowd.cancel("left")
        await crowd.end("full")
        assert crowd.admitted == ["full", "beyond", "patient"]
        assert crowd.budget.total == 21
        await crowd.cancel("patient")
        await crowd.end("beyond")
    assert crowd.budget.total == 0
