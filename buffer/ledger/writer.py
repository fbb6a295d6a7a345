"""The group commit of the replay core: changes applied in memory, made durable in shared transactions.

Invariants:
- A call returns after its change is durable. Calls that arrive while a transaction is being written share the next one.
- The core is never ahead of the disk for long: when a write fails for any reason, or a change to the core is
  interrupted halfway, the writer ends and every later call raises LedgerBroken. Opening the store again folds the core
  from the disk.
- All SQLite work runs in one thread; the event loop never waits for the disk, except to recall rows from the archive.
  A ledger in memory is used without a thread, since virtual time has no threads.
- A typed error of the core changes nothing and does not end the writer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from headrace.buffer.core.records import Snapshot
from headrace.buffer.core.replay import ReplayBuffer
from headrace.buffer.errors import LedgerBroken, LedgerMismatch, ReplayError
from headrace.buffer.ledger.ledger import Ledger, StoredTrajectory
from headrace.buffer.trajectories.types import CheckpointRef

T = TypeVar("T")


SHORTEST_WAIT_S = 0.001
"""Shortest wait for a group to become due. The clock may be coarser than the loop's: a group that is nearly due must
not cause a busy loop."""


class LedgerWriter:
    """Owner of the core, the ledger and the ledger's thread. `clock` gives seconds since the Unix epoch."""

    def __init__(
        self, core: ReplayBuffer, ledger: Ledger, executor: ThreadPoolExecutor | None, clock: Callable[[], float]
    ) -> None:
        self.core, self.ledger, self.clock = core, ledger, clock
        self.stored: list[StoredTrajectory] = []
        """Trajectories to be written with the next transaction."""
        self._executor = executor
        self._copier = executor and ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger-copy")
        self._writing = asyncio.Lock()
        self._applied = self._durable = 0
        self._changed = asyncio.Event()
        self._broken: str | None = None
        self._closed = False

    async def aclose(self) -> None:
        """Wait for the current transaction and close the files; idempotent. Later calls raise LedgerBroken."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._broken is None:
                await self._flush()
        finally:
            # Also when that fails: the lock must not outlive the store.
            self._end("the store is closed")
            async with self._writing:
                await self.in_thread(self.ledger.close)
            for executor in (self._executor, self._copier):
                if executor is not None:
                    executor.shutdown(wait=False)

    async def change(self, change: Callable[[], T]) -> T:
        """Apply a change to the core; it is durable when this returns. Raises LedgerBroken, and typed errors of the
        core."""
        result = self.apply(change)
        await self._flush()
        return result

    def apply(self, change: Callable[[], T]) -> T:
        """Apply a change to the core, to be written with the next transaction. If it raises anything but a typed error,
        the writer ends."""
        self.check()
        try:
            result = change()
        except ReplayError:
            raise
        except BaseException as error:
            self._end(f"a change to the core was interrupted halfway ({type(error).__name__}: {error})")
            if not isinstance(error, Exception):
                raise
            raise LedgerBroken(f"{self._broken}; restart the buffer") from error
        self._applied += 1
        return result

    async def until(self, attempt: Callable[[], T | None], timeout_s: float) -> T | None:
        """Apply `attempt` now, after each change, and when a group or a probe is due, until it returns a value other
        than None or the timeout expires."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            changed = self._changed
            result = await self.change(attempt)
            if result is not None:
                return result
            now = self.clock()
            times = [at for at in (self.core.due_at(), self.core.outages.wakes_at(now)) if at is not None]
            due_in_s = max(SHORTEST_WAIT_S, min(times) - now) if times else math.inf
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + due_in_s)):
                    await changed.wait()
            except TimeoutError:
                if loop.time() >= deadline:
                    return None

    async def write_alone(self, work: Callable[[], T]) -> T:
        """Run work on the ledger between two transactions."""
        async with self._writing:
            self.check()
            return await self.read(work)

    async def read(self, work: Callable[[], T]) -> T:
        """Run work in the ledger's thread. If it fails, the writer ends."""
        with self._ending_on_failure():
            return await self.in_thread(work)

    async def copy(self, work: Callable[[], T]) -> T:
        """Run work in a separate thread, alongside transactions."""
        return await self.in_thread(work, self._copier)

    async def copy_alone(self, work: Callable[[], T]) -> T:
        """Run work between two transactions. If it fails, the writer does not end."""
        self.check()
        async with self._writing:
            return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T], executor: ThreadPoolExecutor | None = None) -> T:
        """Run work to its end even when the caller is cancelled, so that a transaction is never left in doubt."""
        if self._executor is None:
            return work()

        def run() -> T | Exception:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - a future accepts no StopIteration: it would never be done
                return error

        future = asyncio.get_running_loop().run_in_executor(executor or self._executor, run)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
        result = future.result()
        if isinstance(result, Exception):
            raise result
        if cancelled is not None:
            raise cancelled
        return result

    async def refuse_lost_history(self, checkpoint: CheckpointRef | None) -> None:
        """Raise LedgerMismatch when a return to `checkpoint` undoes steps that were lost with the archive."""
        chain = checkpoint.chain if checkpoint else ""
        if await self.write_alone(lambda: self.ledger.archive_lacks(chain)):
            wanted = checkpoint.path if checkpoint else "the start"
            raise LedgerMismatch(
                f"a return to {wanted} undoes steps that are in archive.db, which is missing or was replaced: put it "
                "back, e.g. from a copy of the run, or resume from the newest checkpoint"
            )

    async def recall_steps_after(self, checkpoint: CheckpointRef | None) -> None:
        """Bring back from the archive the steps that a return to `checkpoint` undoes, unless all of them are known.
        Raises LedgerMismatch when the archive was lost."""
        if self.core.epochs.needs_history(checkpoint):
            await self.refuse_lost_history(checkpoint)
            await self.recall(lambda: self.ledger.recall(checkpoint.chain if checkpoint else ""))

    async def recall(self, recall: Callable[[], None]) -> None:
        """Bring rows back from the archive and fold the core again. This blocks the event loop, because nothing may
        change meanwhile."""
        async with self._writing:
            self.check()
            changes, stored, self.stored = self.core.drain(), self.stored, []

            def write_and_load() -> Snapshot:
                self.ledger.write(changes, stored)
                recall()
                return self.ledger.load()

            with self._ending_on_failure():
                executor = self._executor
                snapshot = executor.submit(write_and_load).result() if executor else write_and_load()
            self.core.fold(snapshot)

    def check(self) -> None:
        """Raise LedgerBroken if the writer has ended."""
        if self._broken is not None:
            raise LedgerBroken(f"the store has ended: {self._broken}")

    async def _flush(self) -> None:
        """Return when everything applied so far is durable. The first caller writes on behalf of all that are
        waiting."""
        wanted = self._applied
        async with self._writing:
            self.check()
            if self._durable >= wanted:
                return
            applied, changes, stored = self._applied, self.core.drain(), self.stored
            self.stored = []
            if changes:
                try:
                    await self.read(lambda: self.ledger.write(changes, stored))
                finally:
                    # The write completed also when the caller was cancelled: others wait for it.
                    self._signal()
            self._durable = applied

    @contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """End the writer on any error, since the core was drained or the ledger cannot be read. Raises LedgerBroken."""
        try:
            yield
        except LedgerBroken as error:
            self._end(str(error))
            raise
        except Exception as error:
            self._end(f"the ledger failed: {type(error).__name__}: {error}")
            raise LedgerBroken(f"{self._broken}; check the disk, then restart the buffer") from error

    def _end(self, reason: str) -> None:
        self._broken = self._broken or reason
        self._signal()

    def _signal(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
