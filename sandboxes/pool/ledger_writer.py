"""Asynchronous writer of the sandbox ledger: batches changes in order and writes them in a thread.

Invariants:
- `write` returns once its changes are durable; `post` only queues them.
- The event loop never waits for the disk. A ledger in memory is written at once, without a thread.
- After a failed write nothing more is written: `run` ends with the error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.sandboxes.pool.ledger import Change, SandboxLedger


class LedgerWriter:
    """Writes queued changes; `run` it in a task group, and `close` it to write the remaining ones."""

    def __init__(self, ledger: SandboxLedger) -> None:
        self._ledger = ledger
        self._pending: list[Change] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._has_work = asyncio.Event()
        self._writing = asyncio.Lock()

    async def write(self, *changes: Change) -> None:
        """Write changes and wait until they are durable. Raises sqlite3.Error."""
        if not self._ledger.on_disk:
            self.post(*changes)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.extend(changes)
        self._waiting.append(done)
        self._has_work.set()
        await done

    def post(self, *changes: Change) -> None:
        """Queue changes without waiting."""
        if not self._ledger.on_disk:
            self._ledger.apply(changes)
            return
        self._pending.extend(changes)
        self._has_work.set()

    async def run(self) -> None:
        """Write queued changes until cancelled. Raises sqlite3.Error."""
        while self._ledger.on_disk:
            await self._has_work.wait()
            await self._flush()

    async def close(self) -> None:
        """Write the remaining changes. Raises sqlite3.Error."""
        await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            self._has_work.clear()
            changes, self._pending = self._pending, []
            waiting, self._waiting = self._waiting, []
            try:
                if changes:
                    writing = asyncio.ensure_future(asyncio.to_thread(self._ledger.apply, changes))
                    try:
                        await asyncio.shield(writing)
                    except asyncio.CancelledError:
                        # A thread cannot be cancelled, and a second one must not write at the same time.
                        await asyncio.wait([writing])
                        raise
            except BaseException as error:
                _settle(waiting, error)
                raise
            _settle(waiting, None)


def _settle(waiting: list[asyncio.Future[None]], error: BaseException | None) -> None:
    for future in waiting:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        elif isinstance(error, asyncio.CancelledError):
            future.cancel()
        else:
            future.set_exception(error)
