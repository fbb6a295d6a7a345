"""SQLite connections for the ledger, durable transactions, and the stamps of all SQLite files of headrace."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

Stamp: TypeAlias = tuple[int, int]
"""Application id and number of the schema, in the header of a file; both are 0 in a new one."""
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


def stamp_of(database: sqlite3.Connection) -> Stamp:
    """Return the stamp of a database. Raises sqlite3.Error."""
    (application,) = database.execute("PRAGMA application_id").fetchone()
    (schema,) = database.execute("PRAGMA user_version").fetchone()
    return application, schema


def write_stamp(database: sqlite3.Connection, stamp: Stamp) -> None:
    """Write the stamp of a database, within a transaction if one is open. Raises sqlite3.Error."""
    database.execute(f"PRAGMA application_id = {stamp[0]}")
    database.execute(f"PRAGMA user_version = {stamp[1]}")


@contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[None]:
    """Commit the writes of the block durably when it ends, or roll all of them back on an error."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise
