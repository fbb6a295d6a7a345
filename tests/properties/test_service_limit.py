"""The adaptive limit and its slots, for any order of events."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.services.calls import CallLimit, CallSlots

BOUNDS = st.tuples(st.integers(1, 8), st.integers(0, 24)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(BOUNDS, st.lists(st.sampled_from(["begin", "end", "succeed", "overload"]), max_size=200))
def test_the_limit_stays_within_its_bounds_and_changes_by_its_rule(bounds: tuple[int, int], events: list[str]) -> None:
    least, most = bounds
    limit = CallLimit(least=least, most=most)
    begun: list[float] = []
    for now, event in enumerate(events):
        before = limit.limit
        if event == "begin" and limit.has_room:
            limit.begin()
            begun.append(float(now))
        elif event == "end" and begun:
            begun.pop(0)
            limit.end()
        elif event == "succeed" and begun:
            limit.succeeded()
            assert before <= limit.limit <= before + 1
        elif event == "overload" and begun:
            limit.overloaded(begun[0], float(now))
            assert limit.limit == before or limit.limit >= max(least, before // 2)
        assert least <= limit.limit <= most
        assert limit.in_use == len(begun)


@given(st.lists(st.sampled_from(["ask", "leave", "cancel", "overload", "succeed", "turn"]), max_size=60))
def test_no_slot_is_lost_or_given_twice(events: list[str]) -> None:
    async def play() -> None:
        limit = CallLimit(least=1, most=4)
        slots, inside = CallSlots(limit), list[asyncio.Event]()

        async def call() -> None:
            leave = asyncio.Event()
            async with slots.slot():
                inside.append(leave)
                try:
                    await leave.wait()
                finally:
                    inside.remove(leave)

        calls: list[asyncio.Task[None]] = []
        for now, event in enumerate(events):
            match event:
                case "ask":
                    calls.append(asyncio.create_task(call()))
                case "leave" if inside:
                    inside[0].set()
                case "cancel" if calls:
                    calls.pop(0).cancel()
                case "overload":
                    limit.overloaded(float(now), float(now))
                case "succeed":
                    limit.succeeded()
                case "turn":
                    await asyncio.sleep(0)
            assert len(inside) <= limit.in_use <= 4
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        # One turn for the tasks that were cancelled first.
        await asyncio.sleep(0)
        assert (limit.in_use, slots.waiting, inside) == (0, 0, [])

    asyncio.run(play())
