"""Leases that are being acquired: identical requests share one boot, and a holder's boots can be cancelled.

Invariants:
- A boot runs in a task of the pool for as long as a caller waits for it.
- A lease that becomes ready when no caller is waiting any more is passed to `discard`, never lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from headrace.sandboxes.errors import SandboxGone
from headrace.sandboxes.pool.boot import Lease


@dataclass(slots=True, eq=False)
class _Running:
    holder: str
    request_key: str
    task: asyncio.Task[Lease | Exception]
    waiters: int = 0


class PendingLeases:
    """Acquires leases in tasks of the group `tasks`."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[_Running, None] = {}
        self._by_request: dict[tuple[str, str], _Running] = {}

    async def join(
        self, holder: str, request_key: str, begin: Callable[[], Awaitable[Lease]], discard: Callable[[Lease], None]
    ) -> Lease:
        """Wait for a request's lease, which `begin` acquires unless it is already pending. Raises the errors that
        `begin` raises, and SandboxGone if the holder has been released."""
        running = self._by_request.get((holder, request_key))
        if running is None:

            async def run() -> Lease | Exception:
                try:
                    return await begin()
                except Exception as error:  # noqa: BLE001 - belongs to the callers, not to the pool's task group
                    return error

            running = _Running(holder, request_key, self._tasks.create_task(run()))
            self._running[running] = None
            if request_key:
                self._by_request[holder, request_key] = running
            running.task.add_done_callback(partial(self._ended, running))
        running.waiters += 1
        try:
            await asyncio.wait([running.task])
        except asyncio.CancelledError:
            running.waiters -= 1
            if running.waiters == 0:
                # The next equal request begins a new boot. This one may be ready just now, or while it is cancelled.
                self._forget(running)
                running.task.cancel()

                def ended(task: asyncio.Task[Lease | Exception]) -> None:
                    if not task.cancelled() and not isinstance(result := task.result(), Exception):
                        discard(result)

                running.task.add_done_callback(ended)
            raise
        if running.task.cancelled():
            raise SandboxGone(f"the lease was cancelled: its holder {holder!r} was released")
        if isinstance(result := running.task.result(), Exception):
            raise result
        return result

    def _ended(self, running: _Running, _: asyncio.Task[Lease | Exception]) -> None:
        self._running.pop(running, None)
        self._forget(running)

    def _forget(self, running: _Running) -> None:
        name = (running.holder, running.request_key)
        if self._by_request.get(name) is running:
            del self._by_request[name]

    async def cancel(self, holder: str) -> None:
        """Cancel all pending leases of a holder; returns once they have ended."""
        await _end([running.task for running in self._running if running.holder == holder])

    async def cancel_all(self) -> None:
        await _end([running.task for running in self._running])


async def _end(tasks: list[asyncio.Task[Lease | Exception]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
