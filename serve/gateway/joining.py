"""Long work that several calls share, because whoever asked first may be dead.

Invariants:
- For one key one piece of work runs at a time; a call that comes while it runs waits for the same result.
- It ends with its last waiter's cancellation, or by `cancel`. The call of a dead caller counts as a waiter: nobody
  cancels it. Who comes while work that its waiters left is ending, waits for that end and starts it anew.
- Its error belongs to the waiters and disturbs nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Hashable

R = TypeVar("R")


@dataclass(slots=True)
class _Work(Generic[R]):
    result: asyncio.Future[R]
    task: asyncio.Task[None]
    waiters: int = 0
    left: bool = False


class Joined(Generic[R]):
    """`await joined(key, work)`: the result of the one `work()` that runs for `key`, a task of `tasks`."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[Hashable, _Work[R]] = {}

    async def __call__(self, key: Hashable, work: Callable[[], Awaitable[R]]) -> R:
        while (running := self._running.get(key)) is not None and running.left:
            await asyncio.wait({running.task})
        if running is None:
            result: asyncio.Future[R] = asyncio.get_running_loop().create_future()
            task = self._tasks.create_task(self._run(key, work, result))
            running = self._running[key] = _Work(result, task)
        running.waiters += 1
        try:
            return await asyncio.shield(running.result)
        finally:
            running.waiters -= 1
            if running.waiters == 0 and not running.result.done():
                running.left = True
                running.task.cancel()

    def cancel(self, key: Hashable) -> None:
        """End the work for `key`; its waiters are cancelled. Nothing when none runs."""
        if running := self._running.get(key):
            running.task.cancel()

    def cancel_all(self) -> None:
        """`cancel` for every key."""
        for running in self._running.values():
            running.task.cancel()

    async def ended(self) -> None:
        """Wait until nothing runs any more."""
        if self._running:
            await asyncio.wait([running.task for running in self._running.values()])

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def __len__(self) -> int:
        """Number of keys whose work is running."""
        return len(self._running)

    async def _run(self, key: Hashable, work: Callable[[], Awaitable[R]], result: asyncio.Future[R]) -> None:
        try:
            result.set_result(await work())
        except asyncio.CancelledError:
            result.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - handed to those who wait for it
            result.set_exception(error)
            # Seen also when nobody waits any more: the next call starts the work again and meets the error itself.
            result.exception()
        finally:
            del self._running[key]
