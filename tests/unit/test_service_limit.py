"""The adaptive limit on concurrent calls, and the slots under it."""

from __future__ import annotations

import asyncio

import pytest

from headrace.actors.services.calls import CallLimit, CallSlots


def full(limit: CallLimit) -> None:
    while limit.has_room:
        limit.begin()


async def until_waiting(slots: CallSlots, number: int) -> None:
    """Let the other tasks run until so many of them wait."""
    for _ in range(100):
        if slots.waiting == number:
            return
        await asyncio.sleep(0)
    raise AssertionError(slots.waiting)


def test_an_overload_halves_the_limit_once_for_all_calls_that_met_it() -> None:
    limit = CallLimit(least=1, most=64)
    full(limit)
    for _ in range(10):
        limit.overloaded(began_s=0.0, now=1.0)
    assert limit.limit == 32
    limit.overloaded(began_s=1.0, now=2.0)
    assert limit.limit == 16


def test_the_limit_grows_by_one_after_a_round_of_successes() -> None:
    limit = CallLimit(least=1, most=64)
    limit.overloaded(0.0, 1.0)
    full(limit)
    for _ in range(31):
        limit.succeeded()
    assert limit.limit == 32
    limit.succeeded()
    assert limit.limit == 33


def test_successes_without_any_need_for_more_calls_do_not_raise_the_limit() -> None:
    limit = CallLimit(least=1, most=8)
    limit.overloaded(0.0, 1.0)
    limit.begin()
    for _ in range(100):
        limit.succeeded()
    assert limit.limit == 4


def test_the_limit_stays_within_its_bounds() -> None:
    limit = CallLimit(least=3, most=5)
    for second in range(10):
        limit.overloaded(float(second), second + 0.5)
    assert limit.limit == 3
    for _ in range(100):
        full(limit)
        limit.succeeded()
    assert limit.limit == 5


async def test_slots_are_given_in_order_and_a_cancelled_caller_loses_none() -> None:
    limit = CallLimit(least=1, most=1)
    slots, order = CallSlots(limit), list[int]()
    leave = asyncio.Event()

    async def call(number: int) -> None:
        async with slots.slot():
            order.append(number)
            await leave.wait()

    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(call(number)) for number in range(4)]
        await until_waiting(slots, 3)
        calls[1].cancel()
        leave.set()
    assert order == [0, 2, 3]
    assert (limit.in_use, slots.waiting) == (0, 0)


async def test_a_caller_that_is_cancelled_with_its_slot_just_given_returns_it() -> None:
    limit = CallLimit(least=1, most=1)
    slots = CallSlots(limit)
    async with slots.slot():
        waiting = asyncio.create_task(slots.slot().__aenter__())
        await until_waiting(slots, 1)
    # The slot is the waiter's now, which has not run since.
    assert limit.in_use == 1
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert limit.in_use == 0
