"""Ledger of a pool's sandboxes: one file of tables, from which a restarted pool recovers.

The ledger is synchronous and may be used by one thread at a time.

Invariants:
- `apply` is one transaction: once it has returned, a crash of the process loses none of its changes. (A crash of the
  machine may lose the most recent changes. The machine's local sandboxes are then gone too, and remote ones are found
  by the owner label or end with their lease.)
- Times are Unix seconds, because the ledger outlives the monotonic clocks of its processes.
- `write` returns once its changes are durable; `post` only queues them.
- The event loop never waits for the disk. An in-memory ledger is written at once, without a thread.
- After a failed write, nothing more is written and `run` raises the error.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeAlias

from headrace.buffer.primitives.tables import TableError, TableFile
from headrace.sandboxes.base import SandboxRef
from headrace.sandboxes.errors import SandboxLedgerRefused
from headrace.sandboxes.host.private_folders import make_missing

FILE_NAME: Final = "sandboxes.db"
_STAMP: Final = (0x48525350, 1)
"""`HRSP`, and the number of the schema: these tables are of a sandbox pool."""


class EntryState(StrEnum):
    """Stage of a sandbox's life."""

    INTENDED = "intended"
    """It may exist: a create with this key is running, or its outcome is unknown."""
    HELD = "held"
    """It exists and has, or may have, a holder."""
    ENDING = "ending"
    """It is to be killed, and its death has not been confirmed yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One sandbox, or the intent to boot one. It is identified by (`host`, `key`), where `key` is the idempotency key
    sent to the provider."""

    host: str
    key: str
    state: EntryState
    request_key: str
    """The request's idempotency key; empty if it has none."""
    holder: str
    image: str
    deadline_s: float
    frozen: bool = False
    evaluation: bool = False
    ref: SandboxRef | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Removes a sandbox that is gone or was never made."""

    host: str
    key: str


@dataclass(frozen=True, slots=True)
class Renewed:
    """Leases all sandboxes of `holder` until `deadline_s`, in one row."""

    holder: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class HolderGone:
    """Removes a holder without leases."""

    holder: str


Change: TypeAlias = Entry | Drop | Renewed | HolderGone


@dataclass(frozen=True, slots=True)
class _Owner:
    label: str


class SandboxLedger:
    """An open ledger; `close` it after use."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open or create the ledger in `folder`. Without one it is in memory, for pools whose sandboxes end with their
        process, and for virtual time. Raises SandboxLedgerRefused."""
        try:
            if folder is not None:
                make_missing(folder)
            self._file = TableFile(folder and folder / FILE_NAME, _STAMP)
            self._owners = self._file.table("owners", _Owner, "label")
            self._sandboxes = self._file.table("sandboxes", Entry, "host", "key")
            self._holders = self._file.table("holders", Renewed, "holder")
        except (TableError, OSError) as error:
            raise SandboxLedgerRefused(str(error)) from error

    @property
    def on_disk(self) -> bool:
        return self._file.path is not None

    @property
    def owner(self) -> str:
        """The owner label of the pool's sandboxes: generated once and stored in the ledger."""
        if not self._owners.all():
            self._owners.put(_Owner(secrets.token_hex(8)))
        return self._owners.all()[0].label

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply all changes or none. Raises TableError."""
        with self._file.transaction():
            for change in changes:
                match change:
                    case Entry():
                        self._sandboxes.put(change)
                    case Drop():
                        self._sandboxes.drop(change.host, change.key)
                    case Renewed():
                        self._holders.put(change)
                    case HolderGone():
                        self._holders.drop(change.holder)

    def load(self) -> list[Entry]:
        """Return all entries. Each deadline is the later of the sandbox's own and its holder's. Raises TableError."""
        holders = {renewed.holder: renewed.deadline_s for renewed in self._holders.all()}
        return [
            replace(entry, deadline_s=max(entry.deadline_s, holders.get(entry.holder, entry.deadline_s)))
            for entry in self._sandboxes.all()
        ]

    def close(self) -> None:
        """Close the file and release its lock. Idempotent."""
        self._file.close()


class SandboxLedgerWriter:
    """Writes queued changes; `run` it in a task group, and `close` it to write the remaining ones."""

    def __init__(self, ledger: SandboxLedger) -> None:
        self._ledger = ledger
        self._pending: list[Change] = []
        self._waiting: list[asyncio.Future[None]] = []
        self._has_work = asyncio.Event()
        self._writing = asyncio.Lock()

    async def write(self, *changes: Change) -> None:
        """Write changes and wait until they are durable. Raises TableError."""
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
        """Write queued changes until cancelled. Raises TableError."""
        while self._ledger.on_disk:
            await self._has_work.wait()
            await self._flush()

    async def close(self) -> None:
        """Write the remaining changes. Raises TableError."""
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
                        # A thread cannot be cancelled, and a second one must not write at the same time. What it has
                        # written is durable, and those who wait for that are told so.
                        await asyncio.wait([writing])
                        if writing.exception() is None:
                            _settle(waiting, None)
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
