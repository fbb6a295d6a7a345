"""Single flight: concurrent calls for the same key share one run of their work.

Invariants:
- At most one run per key is active; a call that arrives during it waits for the same result.
- A run is cancelled when its last waiter is cancelled, or by `cancel`. The call of a dead caller counts as a waiter,
  since nobody cancels it. A call that arrives while an abandoned run is still ending waits until it has ended and
  starts a new run.
- An error raised by the work reaches only its waiters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

R = TypeVar("R")


@dataclass(slots=True)
class _Flight(Generic[R]):
    result: asyncio.Future[R]
    task: asyncio.Task[None]
    waiters: int = 0
    abandoned: bool = False


class SingleFlight(Generic[R]):
    """`await flights(key, work)` returns the result of the one `work()` that is running for `key`, as a task in the
    task group `tasks`."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[Hashable, _Flight[R]] = {}

    async def __call__(self, key: Hashable, work: Callable[[], Awaitable[R]]) -> R:
        while (running := self._running.get(key)) is not None and running.abandoned:
            await asyncio.wait({running.task})
        if running is None:
            result: asyncio.Future[R] = asyncio.get_running_loop().create_future()

            async def run() -> None:
                try:
                    result.set_result(await work())
                except asyncio.CancelledError:
                    result.cancel()
                    raise
                except Exception as error:  # noqa: BLE001 - raised by those who wait for it
                    result.set_exception(error)
                    # Marks it as retrieved: when nobody waits any more, the next call runs the work again.
                    result.exception()
                finally:
                    del self._running[key]

            running = self._running[key] = _Flight(result, self._tasks.create_task(run()))
        running.waiters += 1
        try:
            return await asyncio.shield(running.result)
        finally:
            running.waiters -= 1
            if running.waiters == 0 and not running.result.done():
                running.abandoned = True
                running.task.cancel()

    def cancel(self, key: Hashable) -> None:
        """Cancel the run for `key`, if there is one, and its waiters."""
        if running := self._running.get(key):
            running.task.cancel()

    def cancel_all(self) -> None:
        """Cancel every run and its waiters."""
        for running in self._running.values():
            running.task.cancel()

    async def ended(self) -> None:
        """Wait until no run is active any more."""
        if self._running:
            await asyncio.wait([running.task for running in self._running.values()])

    def __iter__(self) -> Iterator[Hashable]:
        """Yield the keys with an active run, in the order in which they began."""
        return iter(self._running)

    def is_abandoned(self, key: Hashable) -> bool:
        """Return whether the run for this key is ending because its last waiter was cancelled."""
        running = self._running.get(key)
        return running is not None and running.abandoned

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def __len__(self) -> int:
        """Number of keys with an active run."""
        return len(self._running)
