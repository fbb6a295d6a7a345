"""Ledger of a pool's sandboxes: one SQLite file, from which a restarted pool recovers.

The ledger is synchronous and may be used by one thread at a time.

Invariants:
- Only one process has a ledger open, ensured by a lock that the kernel releases when the process exits. The file has
  mode 600, because it holds sandbox secrets.
- `apply` is one transaction: once it has returned, a crash of the process loses none of its changes. (WAL with
  synchronous=NORMAL: a crash of the machine may lose the most recent changes. The machine's local sandboxes are then
  gone too, and remote ones are found by the owner label or end with their lease.)
- Times are Unix seconds, because the ledger outlives the monotonic clocks of its processes.
- `write` returns once its changes are durable; `post` only queues them.
- The event loop never waits for the disk. An in-memory ledger is written at once, without a thread.
- After a failed write, nothing more is written and `run` raises the error.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final, Self, TypeAlias

from headrace.buffer.primitives.file_lock import FileLock
from headrace.sandboxes.base import SandboxId, SandboxRef
from headrace.sandboxes.errors import LedgerRefused
from headrace.sandboxes.host.private_folders import make_missing

FILE_NAME: Final = "sandboxes.db"
_SCHEMA_VERSION: Final = 1
_PRIMARY: Final = 0xFF
"""Mask for the primary code in SQLite's extended error codes."""
_DISK_TROUBLE: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY})
_DDL: Final = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sandboxes (
  host TEXT NOT NULL, key TEXT NOT NULL, state TEXT NOT NULL, request_key TEXT NOT NULL, holder TEXT NOT NULL,
  image TEXT NOT NULL, deadline_s REAL NOT NULL, frozen INTEGER NOT NULL, evaluation INTEGER NOT NULL,
  provider TEXT, id TEXT, endpoint TEXT, secret TEXT,
  PRIMARY KEY (host, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS holders (holder TEXT PRIMARY KEY, deadline_s REAL NOT NULL) WITHOUT ROWID;
"""
_COLUMNS: Final = "host key state request_key holder image deadline_s frozen evaluation provider id endpoint secret"


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
    """Leases all sandboxes of `holder` until `deadline_s`."""

    holder: str
    deadline_s: float


@dataclass(frozen=True, slots=True)
class HolderGone:
    """Removes a holder without leases."""

    holder: str


Change: TypeAlias = Entry | Drop | Renewed | HolderGone


class SandboxLedger:
    """An open ledger, created by `open` or `in_memory`; `close` it after use."""

    def __init__(self, database: sqlite3.Connection, lock: FileLock | None) -> None:
        self._database = database
        self._lock = lock

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Open or create the ledger in `folder`. Raises LedgerRefused."""
        make_missing(folder)
        path = folder / FILE_NAME
        # SQLite gives its side files the mode of the file itself.
        try:
            lock = FileLock(path.with_suffix(".lock"), blocking=False, mode=0o600)
        except BlockingIOError as error:
            raise LedgerRefused(f"{path} is in use by another process: give each pool its own ledger") from error
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            path.chmod(0o600)
            return cls(_prepared(sqlite3.connect(path, check_same_thread=False, isolation_level=None)), lock)
        except sqlite3.DatabaseError as error:
            lock.release()
            if getattr(error, "sqlite_errorcode", 0) & _PRIMARY in _DISK_TROUBLE:
                raise LedgerRefused(f"{path} cannot be opened ({error}): repair the disk, then restart") from error
            raise LedgerRefused(f"{path} is not a sandbox ledger of this version ({error}): move it away") from error

    @classmethod
    def in_memory(cls) -> Self:
        """Return a ledger without a file, for pools whose sandboxes end with their process, and for virtual time."""
        return cls(_prepared(sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)), None)

    @property
    def on_disk(self) -> bool:
        return self._lock is not None

    @property
    def owner(self) -> str:
        """The owner label of the pool's sandboxes: generated once and stored in the ledger."""
        row = self._database.execute("SELECT value FROM meta WHERE name = 'owner'").fetchone()
        if row is None:
            row = (secrets.token_hex(8),)
            self._database.execute("INSERT INTO meta VALUES ('owner', ?)", row)
        return str(row[0])

    def apply(self, changes: Iterable[Change]) -> None:
        """Apply all changes or none. Raises sqlite3.Error."""
        execute = self._database.execute
        execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                match change:
                    case Entry():
                        row = _row(change)
                        execute(f"INSERT OR REPLACE INTO sandboxes VALUES ({', '.join('?' * len(row))})", row)
                    case Drop():
                        execute("DELETE FROM sandboxes WHERE host = ? AND key = ?", (change.host, change.key))
                    case Renewed():
                        execute("INSERT OR REPLACE INTO holders VALUES (?, ?)", (change.holder, change.deadline_s))
                    case HolderGone():
                        execute("DELETE FROM holders WHERE holder = ?", (change.holder,))
        except BaseException:
            execute("ROLLBACK")
            raise
        execute("COMMIT")

    def load(self) -> list[Entry]:
        """Return all entries. Each deadline is the later of the sandbox's own and its holder's."""
        holders = dict(self._database.execute("SELECT holder, deadline_s FROM holders"))
        rows = self._database.execute(f"SELECT {', '.join(_COLUMNS.split())} FROM sandboxes")
        entries = [_entry(row) for row in rows]
        return [
            replace(entry, deadline_s=max(entry.deadline_s, holders.get(entry.holder, entry.deadline_s)))
            for entry in entries
        ]

    def close(self) -> None:
        """Close the file and release its lock. Idempotent."""
        self._database.close()
        if self._lock is not None:
            self._lock.release()


def _prepared(database: sqlite3.Connection) -> sqlite3.Connection:
    """Configure a database and create its tables. Raises sqlite3.DatabaseError if the file is not such a database."""
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "busy_timeout = 5000"):
        database.execute(f"PRAGMA {pragma}")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, _SCHEMA_VERSION):
        database.close()
        raise sqlite3.DatabaseError(f"schema version {version}, not {_SCHEMA_VERSION}")
    database.executescript(_DDL)
    database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
    return database


def _row(entry: Entry) -> tuple[object, ...]:
    ref = entry.ref
    return (
        *(entry.host, entry.key, entry.state.value, entry.request_key, entry.holder, entry.image, entry.deadline_s),
        *(entry.frozen, entry.evaluation),
        *((ref.provider, ref.id, ref.endpoint, ref.secret) if ref is not None else (None,) * 4),
    )


def _entry(row: tuple[str, ...]) -> Entry:
    host, key, state, request_key, holder, image, deadline_s, frozen, evaluation, *ref = row
    provider, sandbox_id, endpoint, secret = ref
    return Entry(
        host=host,
        key=key,
        state=EntryState(state),
        request_key=request_key,
        holder=holder,
        image=image,
        deadline_s=float(deadline_s),
        frozen=bool(frozen),
        evaluation=bool(evaluation),
        ref=None
        if sandbox_id is None
        else SandboxRef(provider=provider, id=SandboxId(sandbox_id), endpoint=endpoint, secret=secret),
    )


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
