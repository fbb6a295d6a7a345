"""SQLite connections for the ledger, which has one writer. A transaction is durable when its block ends."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "busy_timeout = 5000")


def connect(path: Path | None, *, foreign_keys: bool = True) -> sqlite3.Connection:
    """Open a connection for writing, to a database in memory if `path` is None. Raises sqlite3.Error."""
    database = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, check_same_thread=False)
    try:
        for pragma in (*_PRAGMAS, f"foreign_keys = {'ON' if foreign_keys else 'OFF'}"):
            database.execute(f"PRAGMA {pragma}")
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit the writes of the block durably, or roll all of them back on an error."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
