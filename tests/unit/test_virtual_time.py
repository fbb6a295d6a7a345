"""Virtual time: what moves it, what it refuses, and how it ends where nothing can go on."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable

import pytest

from headrace.actors.simulation.virtual.virtual_time import Deadlock, Standstill, VirtualTimeError, run_virtual


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_time_advances_to_the_next_timer() -> None:
    async def main() -> float:
        assert now_s() == 0.0
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(86400))
        await asyncio.sleep(0)
        return now_s()

    assert run_virtual(main()) == 86400.0


def test_timers_due_at_the_same_time_run_in_the_order_they_were_set() -> None:
    async def main() -> list[int]:
        loop, ran = asyncio.get_running_loop(), list[int]()
        for number in range(100):
            loop.call_at(5.0, ran.append, number)
        await asyncio.sleep(6)
        return ran

    assert run_virtual(main()) == list(range(100))


def test_cancelled_timeouts_do_not_advance_time_and_are_removed() -> None:
    async def main() -> tuple[float, int]:
        for _ in range(10_000):
            async with asyncio.timeout(1e9):
                await asyncio.sleep(1)
        return now_s(), len(asyncio.get_running_loop()._timers)  # type: ignore[attr-defined]

    elapsed_s, left = run_virtual(main())
    assert elapsed_s == 10_000
    assert left < 1000


async def _socket() -> None:
    await asyncio.open_connection("127.0.0.1", 1)


async def _server() -> None:
    await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)


async def _thread() -> None:
    await asyncio.to_thread(int)


async def _subprocess() -> None:
    await asyncio.create_subprocess_exec("true")


async def _shell() -> None:
    await asyncio.create_subprocess_shell("true")


async def _host() -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 1)


async def _reader() -> None:
    asyncio.get_running_loop().add_reader(0, print)


async def _foreign_call() -> None:
    """Another thread cannot wake the loop."""
    loop, errors = asyncio.get_running_loop(), list[BaseException]()

    def call() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except VirtualTimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise errors[0]


@pytest.mark.parametrize(
    "work",
    [_socket, _server, _thread, _subprocess, _shell, _host, _reader, _foreign_call],
    ids=lambda work: work.__name__,
)
def test_operations_outside_virtual_time_are_refused(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    with pytest.raises(VirtualTimeError, match="real event loop"):
        run_virtual(main())


def test_a_deadlock_is_reported_at_once_with_the_waiting_tasks() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.sleep(10)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(waits_for_ever(), name="somebody")

    with pytest.raises(Deadlock, match=r"somebody \(.*waits_for_ever, line \d+\)"):
        run_virtual(main())


def test_waiting_without_any_timer_is_reported_as_a_standstill() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - it is the point
            await asyncio.sleep(0)

    with pytest.raises(Standstill):
        run_virtual(main())


def test_the_random_module_is_seeded_and_its_state_restored() -> None:
    async def main() -> float:
        return random.random()

    random.seed(7)
    before = random.getstate()
    assert run_virtual(main(), seed=1) == run_virtual(main(), seed=1) != run_virtual(main(), seed=2)
    assert random.getstate() == before
