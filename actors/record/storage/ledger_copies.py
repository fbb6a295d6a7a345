"""Copies of the ledger of one running buffer to storage, in the background.

Invariants:
- At most one copy is being made; of the checkpoints that are recorded meanwhile, only the newest is copied next.
- Storage is touched only in daemon threads. A copy that fails or hangs delays neither results nor steps and never ends
  the run: it is reported in the buffer's status and in `ledger_copy.json` beside the ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final, Self

import orjson

from headrace.buffer.core.replay import CopyOutcome
from headrace.buffer.errors import LedgerBroken
from headrace.buffer.ledger.copies import write_copy
from headrace.buffer.ledger.store import ReplayStore
from headrace.buffer.primitives.daemon_thread import start_in_thread
from headrace.buffer.primitives.durable_files import replace_file
from headrace.buffer.trajectories.types import CheckpointRef

logger = logging.getLogger(__name__)

OUTCOME: Final = "ledger_copy.json"
HUNG_S: Final = 600.0
"""A copy that takes longer is reported as hung. It is not repeated before its thread has ended."""
CLOSING_S: Final = 10.0
"""Time for the last copy when the buffer closes."""


class LedgerCopies:
    """Copies of the ledger of `store` from `run_dir` to `storage`; an async context manager. `clock` returns Unix
    seconds."""

    def __init__(
        self,
        store: ReplayStore,
        run_dir: Path,
        storage: Path,
        clock: Callable[[], float],
        *,
        hung_s: float = HUNG_S,
        closing_s: float = CLOSING_S,
    ) -> None:
        self._hung_s, self._closing_s = hung_s, closing_s
        self._store, self._run_dir, self._storage, self._clock = store, run_dir, storage, clock
        self.outcome = read_outcome(run_dir) or CopyOutcome()
        """Outcome of the last copy, also of one that an earlier process made."""
        self._wanted: CheckpointRef | None = None
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._copying: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._copying = asyncio.create_task(self._copy_all(), name="ledger copies")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._copying is not None
        try:
            async with asyncio.timeout(self._closing_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("the buffer closes before its ledger is copied to %s", self._storage)
        self._copying.cancel()
        await asyncio.wait([self._copying])

    def request(self, checkpoint: CheckpointRef) -> None:
        """Copy the ledger for a checkpoint that it has recorded; returns at once. A ledger that broke is not copied."""
        if self._copying is not None and self._copying.done():
            return
        self._wanted = checkpoint
        self._idle.clear()
        self._changed.set()

    async def idle(self) -> None:
        """Wait until no copy is being made or requested."""
        await self._idle.wait()

    async def _copy_all(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            checkpoint, self._wanted = self._wanted, None
            try:
                if checkpoint is not None:
                    await self._copy(checkpoint)
                    await self._drop_covered(checkpoint)
            except LedgerBroken as error:
                # The buffer's next call fails with the same error, and ends its process.
                logger.warning("no more copies of the ledger are made: %s", error)
                self._wanted = None
                return
            finally:
                if self._wanted is None:
                    self._idle.set()

    async def _copy(self, checkpoint: CheckpointRef) -> None:
        copying = start_in_thread(
            lambda: write_copy(self._run_dir, self._storage, checkpoint.version, taken_at_s=self._clock()),
            name="ledger copy",
        )
        version = str(checkpoint.version)
        try:
            if not (await asyncio.wait([copying], timeout=self._hung_s))[0]:
                await self._fail(version, f"{self._storage} has not answered for {self._hung_s:.0f} s")
            await copying
        except (OSError, ValueError) as error:
            await self._fail(version, f"{type(error).__name__}: {error}")
        else:
            await self._record(CopyOutcome(version=version, at_s=self._clock()))

    async def _drop_covered(self, checkpoint: CheckpointRef) -> None:
        """Delete the trajectories that no checkpoint directory needs; none if these cannot be listed."""
        folder = Path(checkpoint.path).parent
        try:
            kept = await start_in_thread(lambda: [path.name for path in folder.iterdir()], name="checkpoints")
        except OSError as error:
            logger.warning("no trajectories are deleted, because %s cannot be read: %s", folder, error)
            return
        await self._store.trajectory_files.drop_covered(kept)

    async def _fail(self, version: str, error: str) -> None:
        logger.error("the ledger was not copied to %s for checkpoint %s: %s", self._storage, version, error)
        await self._record(replace(self.outcome, failed=version, failed_at_s=self._clock(), error=error))

    async def _record(self, outcome: CopyOutcome) -> None:
        data = orjson.dumps(asdict(outcome)) + b"\n"
        try:
            await asyncio.to_thread(replace_file, self._run_dir / OUTCOME, data)
        except OSError as error:
            logger.warning("the outcome of the last copy of the ledger cannot be recorded: %s", error)
        self.outcome = outcome


def read_outcome(run_dir: Path) -> CopyOutcome | None:
    """Return the outcome of the last copy that a run's buffer recorded; None if there is none or it is unreadable."""
    try:
        return CopyOutcome(**orjson.loads((run_dir / OUTCOME).read_bytes()))
    except (OSError, TypeError, ValueError):
        return None
