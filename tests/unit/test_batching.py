"""What travels together, in virtual time: windows, and calls under way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.actors.runtime.actors.batching import DEFAULT_WINDOW_S, TOGETHER_S, Batcher
from headrace.actors.runtime.actors.operations import NO_ATTEMPTS, Attempts, OperationCalls, Operations, Results
from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.serve.tracing.attempts import ROLLOUT_ATTEMPT, working_for


class SlowCalls:
    """Each call takes `answer_s`; when it began and what it carried is kept."""

    def __init__(self, answer_s: float) -> None:
        self.answer_s = answer_s
        self.calls: list[tuple[float, list[int]]] = []

    async def __call__(self, requests: list[int]) -> list[int]:
        self.calls.append((asyncio.get_running_loop().time(), requests))
        await asyncio.sleep(self.answer_s)
        return [10 * request for request in requests]


async def ask_every(seconds: float, count: int, batcher: Batcher[int, int]) -> list[int]:
    asked = []
    async with asyncio.TaskGroup() as tasks:
        for number in range(count):
            asked.append(tasks.create_task(batcher(number)))
            await asyncio.sleep(seconds)
    return [task.result() for task in asked]


@pytest.mark.parametrize(
    ("answer_s", "carried"),
    [
        # An idle machine answers at once: nobody waits for others.
        (0.001, [[0], [1], [2], [3], [4], [5], [6], [7]]),
        # One that needs 70 ms gets all that came meanwhile.
        (0.07, [[0], [1, 2, 3, 4], [5, 6, 7]]),
        # One that hangs holds nobody up for longer than TOGETHER_S.
        (30.0, [[0], [1, 2, 3, 4, 5, 6], [7]]),
    ],
)
def test_batches_grow_on_a_busy_machine(answer_s: float, carried: list[list[int]]) -> None:
    calls = SlowCalls(answer_s)

    async def history() -> list[int]:
        async with Batcher(calls) as batcher:
            return await ask_every(0.02, 8, batcher)

    assert run_virtual(history()) == [10 * number for number in range(8)]
    assert [requests for _, requests in calls.calls] == carried
    waits = [began_s - 0.02 * requests[0] for began_s, requests in calls.calls]
    assert max(waits) <= DEFAULT_WINDOW_S + TOGETHER_S + 1e-9


class CountedOperations:
    """Operations that take a second each."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []

    async def work(self, request: int) -> int:
        await asyncio.sleep(1.0)
        return 10 * request

    async def begin(self, requests: dict[str, int], attempts: Attempts = NO_ATTEMPTS) -> Results[int]:
        self.begun.append(list(requests.values()))
        return await self.operations.begin(requests, attempts)

    async def fetch(self, keys: list[str]) -> Results[int]:
        return await self.operations.fetch(keys)

    async def withdraw(self, keys: list[str]) -> None:
        await self.operations.withdraw(keys)

    async def nothing(self, _: int) -> None:
        raise AssertionError("everything is wanted")


def test_operations_are_batched_while_a_call_is_running() -> None:
    async def history() -> tuple[list[int], list[list[int]]]:
        counted = CountedOperations()
        async with (
            Operations(counted.work, unclaimed=counted.nothing) as counted.operations,  # type: ignore[attr-defined]
            OperationCalls(counted, unclaimed=counted.nothing) as calls,
            asyncio.TaskGroup() as tasks,
        ):
            asked = []
            for number in range(8):
                asked.append(tasks.create_task(calls(str(number), number)))
                await asyncio.sleep(0.02)
            results = [await task for task in asked]
        return results, counted.begun

    results, begun = run_virtual(history())
    assert results == [10 * number for number in range(8)]
    assert begun == [[0], [1, 2, 3, 4, 5], [6, 7]]


class AttemptsOfOperations(CountedOperations):
    """Operations that return the attempt that they work for."""

    async def work(self, request: int) -> Any:
        await asyncio.sleep(1.0)
        return ROLLOUT_ATTEMPT.get()


def test_each_operation_of_a_batch_works_for_the_attempt_of_its_own_caller() -> None:
    async def history() -> list[object]:
        counted = AttemptsOfOperations()
        async with (
            Operations(counted.work, unclaimed=counted.nothing) as counted.operations,  # type: ignore[attr-defined]
            OperationCalls(counted, unclaimed=counted.nothing) as calls,
            asyncio.TaskGroup() as tasks,
        ):
            asked = []
            for number in range(3):
                with working_for((f"r{number}", number) if number != 1 else None):
                    asked.append(tasks.create_task(calls(str(number), number)))
            results: list[object] = [await task for task in asked]
        assert counted.begun == [[0, 1, 2]]
        return results

    assert run_virtual(history()) == [("r0", 0), None, ("r2", 2)]
