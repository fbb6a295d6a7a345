"""Writes to the sandbox ledger from an event loop: in order, many in one transaction, in a thread of their own.

Invariants:
- `write` returns after its changes are durable; `post` says only that they will be written, in their turn.
- The loop never waits for the disk. A ledger in memory is written at once, without a thread.
- After a failed write nothing more is written: whoever runs the writer ends with the error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.sandboxes.pool.ledger import Change, SandboxLedger


class LedgerWriter:
    """`run` it in a task group; `close` writes what is left."""

    def __init__(self, ledger: SandboxLedger) -> None:
        self._ledger = ledger
        self._pending: list[Change] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._has_work = asyncio.Event()
        self._writing = asyncio.Lock()

    async def write(self, *changes: Change) -> None:
        """Raises sqlite3.Error when the ledger could not be written."""
        if not self._ledger.on_disk:
            self.post(*changes)
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.extend(changes)
        self._waiting.append(done)
        self._has_work.set()
        await done

    def post(self, *changes: Change) -> None:
        """Write without being waited for."""
        if not self._ledger.on_disk:
            self._ledger.apply(changes)
            return
        self._pending.extend(changes)
        self._has_work.set()

    async def run(self) -> None:
        """Write what comes until cancelled. Raises sqlite3.Error."""
        while self._ledger.on_disk:
            await self._has_work.wait()
            await self._flush()

    async def close(self) -> None:
        """Write what is left. Raises sqlite3.Error."""
        await self._flush()

    async def _flush(self) -> None:
        async with self._writing:
            self._has_work.clear()
            changes, self._pending = self._pending, []
            waiting, self._waiting = self._waiting, []
            try:
                if changes:
                    await self._apply(changes)
            except BaseException as error:
                _settle(waiting, error)
                raise
            _settle(waiting, None)

    async def _apply(self, changes: list[Change]) -> None:
        """A thread cannot be cancelled: whoever is cancelled here waits for it, so that no two write at once."""
        writing = asyncio.ensure_future(asyncio.to_thread(self._ledger.apply, changes))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            raise


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
