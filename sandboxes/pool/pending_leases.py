"""Leases under way, so that the same request twice is one boot, and a holder's boots can be broken off.

Invariants:
- A boot runs in a task of the pool, for as long as somebody waits for it.
- A lease that is ready when nobody waits any more is given up, not lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.sandboxes.errors import SandboxGone

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from headrace.sandboxes.pool.boot import Lease


@dataclass(slots=True, eq=False)
class _Running:
    holder: str
    request_key: str
    task: asyncio.Task[Lease | Exception]
    waiters: int = 0


class PendingLeases:
    """Runs leases in `tasks`."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[_Running, None] = {}
        self._by_request: dict[tuple[str, str], _Running] = {}

    async def join(
        self, holder: str, request_key: str, begin: Callable[[], Awaitable[Lease]], give_up: Callable[[Lease], None]
    ) -> Lease:
        """The lease of a request, which begins unless it runs. Raises what it raises, SandboxGone when its holder was
        released."""
        running = self._by_request.get((holder, request_key)) or self._begin(holder, request_key, begin)
        running.waiters += 1
        try:
            await asyncio.wait([running.task])
        except asyncio.CancelledError:
            running.waiters -= 1
            if running.waiters == 0:
                self._abandon(running, give_up)
            raise
        if running.task.cancelled():
            raise SandboxGone(f"the lease was broken off: its holder {holder!r} was released")
        if isinstance(result := running.task.result(), Exception):
            raise result
        return result

    def _begin(self, holder: str, request_key: str, begin: Callable[[], Awaitable[Lease]]) -> _Running:
        async def run() -> Lease | Exception:
            try:
                return await begin()
            except Exception as error:  # noqa: BLE001 - belongs to those who wait, not to the pool's task group
                return error

        running = _Running(holder, request_key, self._tasks.create_task(run()))
        self._running[running] = None
        if request_key:
            self._by_request[holder, request_key] = running

        def ended(_: asyncio.Task[Lease | Exception]) -> None:
            self._running.pop(running, None)
            self._forget(running)

        running.task.add_done_callback(ended)
        return running

    def _forget(self, running: _Running) -> None:
        name = (running.holder, running.request_key)
        if self._by_request.get(name) is running:
            del self._by_request[name]

    def _abandon(self, running: _Running, give_up: Callable[[Lease], None]) -> None:
        """Break it off; a lease that is just ready, or becomes so while it ends, is given up. Who asks again meanwhile
        begins anew."""

        def ended(task: asyncio.Task[Lease | Exception]) -> None:
            if not task.cancelled() and not isinstance(result := task.result(), Exception):
                give_up(result)

        self._forget(running)
        running.task.cancel()
        running.task.add_done_callback(ended)

    async def cancel(self, holder: str) -> None:
        """Break off everything of a holder; returns when it has ended."""
        await _end([running.task for running in self._running if running.holder == holder])

    async def cancel_all(self) -> None:
        await _end([running.task for running in self._running])


async def _end(tasks: list[asyncio.Task[Lease | Exception]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
