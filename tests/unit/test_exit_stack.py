"""The exit stack: it ends where that of Python 3.11 loops forever, and keeps its results and errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from headrace.buffer.primitives.exit_stack import AsyncExitStack

CANCELLED_EXITS = """
import asyncio, contextlib, sys
from headrace.buffer.primitives import exit_stack

Stack = {"contextlib": contextlib, "headrace": exit_stack}[sys.argv[1]].AsyncExitStack

class Owner:
    async def __aenter__(self):
        self.stack = Stack()
        group = await self.stack.enter_async_context(asyncio.TaskGroup())
        group.create_task(asyncio.sleep(0.05))
        self.stack.push_async_callback(asyncio.sleep, 0.05)

    async def __aexit__(self, *_):
        await self.stack.aclose()

async def main():
    async def actor():
        async with Stack() as stack:
            stack.push_async_callback(asyncio.sleep, 0.05)
            await stack.enter_async_context(Owner())
            raise RuntimeError("the actor failed")
    task = asyncio.create_task(actor())
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    print("cancelled" if task.cancelled() else repr(task.exception()))

asyncio.run(main())
"""


def program(library: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", CANCELLED_EXITS, library], stdout=subprocess.PIPE, text=True)


def test_nested_stacks_end_when_an_exit_is_cancelled() -> None:
    with program("headrace") as process:
        assert process.communicate(timeout=60)[0].strip() == "cancelled"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="checked with Python 3.11 only")
def test_the_standard_stack_still_needs_a_replacement() -> None:
    with program("contextlib") as process:
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.communicate(timeout=5)
        finally:
            process.kill()


async def test_errors_and_suppression_are_those_of_nested_context_managers() -> None:
    seen: list[str] = []

    async def record(kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        seen.append(repr(error))
        return isinstance(error, KeyError)

    async def replace(kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        raise KeyError("replaced") from error

    async with AsyncExitStack() as stack:
        stack.push_async_exit(record)
        stack.push_async_exit(replace)
        stack.push_async_exit(record)
        raise ValueError("first")
    assert seen == ["ValueError('first')", "KeyError('replaced')"]
    with pytest.raises(ExceptionGroup) as error:
        async with AsyncExitStack() as stack:
            group = await stack.enter_async_context(asyncio.TaskGroup())
            group.create_task(asyncio.sleep(0)).add_done_callback(lambda _: None)
            raise ValueError("second")
    assert isinstance(error.value.exceptions[0], ValueError)
