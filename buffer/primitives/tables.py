"""Tables of records in a private SQLite file that one process has open.

Invariants:
- A record is a frozen dataclass. Its row has the fields of its key as columns, and all of it as a JSON document.
- The file has mode 600, as SQLite then gives its side files, and is locked by a lock that the kernel releases when the
  process ends. It may be used by one thread at a time.
- Each write is a transaction, or belongs to the block of `transaction`, which is all written or not at all.
- What was written survives a crash of the process, and a crash of the machine if the file is `durable`. Other files
  may then lose their last transactions, and save an fsync for each.
- A file that is damaged, of another program or of another schema is refused and not changed.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from headrace.buffer.primitives.database import Stamp, stamp_of, transaction, write_stamp
from headrace.buffer.primitives.durable_files import fsync
from headrace.buffer.primitives.file_lock import FileLock

T = TypeVar("T")

_PRIMARY: Final = 0xFF
"""Mask for the primary code in SQLite's extended error codes."""
_DISK_TROUBLE: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}


class TableError(Exception):
    """Base class; every message is one line with the path and the fix."""


class TableInUse(TableError):
    """Another process has the file open."""


class TableDamaged(TableError):
    """The file is damaged, of another program, or of another schema."""


class TableDiskError(TableError):
    """The disk is full, read-only or broken."""


class TableFile:
    """An open file; `close` it after use."""

    def __init__(self, path: Path | None, stamp: Stamp, *, durable: bool = False) -> None:
        """Open a file or create it in its folder; without a path it is in memory. `stamp` says of what kind the file
        is, and of which schema. Raises TableError."""
        self.path = path
        self._lock: FileLock | None = None
        self._database: sqlite3.Connection | None = None
        with self.reporting(close=True):
            if path is not None:
                self._lock = FileLock(path.with_suffix(".lock"), blocking=False, mode=0o600)
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                path.chmod(0o600)
            database = sqlite3.connect(path or ":memory:", check_same_thread=False, isolation_level=None)
            self._database = database
            is_empty = database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
            if (found := stamp_of(database)) != stamp and not (is_empty and found == (0, 0)):
                raise TableDamaged(
                    f"{path} is of an unreleased version of headrace, or of another program: move it away"
                )
            for pragma in ("journal_mode = WAL", f"synchronous = {'FULL' if durable else 'NORMAL'}"):
                database.execute(f"PRAGMA {pragma}")
            # After the journal mode, which cannot change within a transaction, and before the first table.
            write_stamp(database, stamp)
            if path is not None and durable:
                fsync(path.parent)

    def table(self, name: str, record: type[T], *key: str) -> Table[T]:
        """Return the table of a dataclass whose fields `key` identify a record. Raises TableError, and closes the file
        then."""
        with self.reporting(close=True):
            return Table(self, name, record, key)

    def execute(self, statement: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        """Execute a statement. Raises sqlite3.Error."""
        assert self._database is not None
        return self._database.execute(statement, values)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write all of the block or nothing. Raises TableError."""
        assert self._database is not None
        with self.reporting(), transaction(self._database):
            yield

    @contextmanager
    def reporting(self, *, close: bool = False) -> Iterator[None]:
        """Raise errors of SQLite, files and records as TableError. If `close` is set, close the file on an error."""
        try:
            yield
        except (sqlite3.Error, OSError, ValidationError, TableError) as error:
            if close:
                self.close()
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & _PRIMARY
            if isinstance(error, BlockingIOError) or code == sqlite3.SQLITE_BUSY:
                raise TableInUse(f"{self.path} is in use by another process: end it, or use another folder") from error
            if isinstance(error, OSError) or code in _DISK_TROUBLE:
                raise TableDiskError(f"{self.path} cannot be used ({error}): repair the disk, then restart") from error
            if isinstance(error, ValidationError) or code != sqlite3.SQLITE_OK:
                reason = f"another form of {error.title}" if isinstance(error, ValidationError) else error
                raise TableDamaged(f"{self.path} cannot be read ({reason}): restore it, or move it away") from error
            raise

    def close(self) -> None:
        """Close the file and release its lock. Idempotent."""
        if self._database is not None:
            self._database.close()
        if self._lock is not None:
            self._lock.release()


class Table(Generic[T]):
    """The records of one dataclass in a file. Every method raises TableError."""

    def __init__(self, file: TableFile, name: str, record: type[T], key: tuple[str, ...]) -> None:
        self._file = file
        self._name = name
        self._key = key
        self._adapter = TypeAdapter(record)
        columns = "".join(f"{field} ANY NOT NULL, " for field in key)
        file.execute(
            f"CREATE TABLE IF NOT EXISTS {name} ({columns}record BLOB NOT NULL, PRIMARY KEY ({', '.join(key)})) "
            "STRICT, WITHOUT ROWID"
        )

    def put(self, record: T) -> None:
        """Insert a record, or replace the one with its key."""
        values = (*(getattr(record, field) for field in self._key), self._adapter.dump_json(record))
        with self._file.reporting():
            self._file.execute(f"INSERT OR REPLACE INTO {self._name} VALUES ({', '.join('?' * len(values))})", values)

    def drop(self, *key: Any) -> None:
        """Remove the record with this key, if there is one."""
        with self._file.reporting():
            self._file.execute(f"DELETE FROM {self._name} WHERE {' = ? AND '.join(self._key)} = ?", key)

    def get(self, *key: Any) -> T | None:
        """Return the record with this key."""
        return next(iter(self.all(*key)), None)

    def all(self, *key: Any, after: Any = None) -> list[T]:
        """Return all records, or those whose key begins with these values and, with `after`, goes on with a greater
        one, in the order of their keys."""
        return self._selected(key, after, ", ".join(self._key))

    def last(self, *key: Any) -> T | None:
        """Return the record whose key begins with all values but the last, which is the greatest."""
        return next(iter(self._selected(key, None, f"{self._key[-1]} DESC LIMIT 1")), None)

    def _selected(self, key: tuple[Any, ...], after: Any, order: str) -> list[T]:
        terms = ["TRUE", *(f"{field} = ?" for field, _ in zip(self._key, key, strict=False))]
        if after is not None:
            terms.append(f"{self._key[len(key)]} > ?")
            key = (*key, after)
        query = f"SELECT record FROM {self._name} WHERE {' AND '.join(terms)} ORDER BY {order}"
        with self._file.reporting():
            return [self._adapter.validate_json(document) for (document,) in self._file.execute(query, key)]
