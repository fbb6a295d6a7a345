"""SQLite database of a server, for secrets and state, in a private folder or in memory.

Invariants:
- The file has mode 0600 in a folder of mode 0700, and a lock allows one server at a time.
- A crash of the server loses nothing. Rows are not fsynced one by one, because a crash of the machine ends the
  sandboxes as well. A call takes well under a millisecond.
- Without a folder the database ends with the server. A file of another schema is refused.
"""

from __future__ import annotations

import os
import sqlite3
from typing import TYPE_CHECKING

from headrace.buffer.primitives.file_lock import FileLock
from headrace.sandboxes.errors import SandboxError, SpecRefused
from headrace.sandboxes.private_folders import make_missing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class ServerDatabase:
    """An open database, whose `connection` commits every statement; `close` it."""

    def __init__(
        self, folder: Path | None, *, file_name: str, lock_name: str, schema_version: int, schema: Sequence[str]
    ) -> None:
        """Open the database. Raises SandboxError if another server uses the folder, SpecRefused if it is unusable."""
        self._lock: FileLock | None = None
        try:
            path = ":memory:"
            if folder is not None:
                make_missing(folder)
                try:
                    self._lock = FileLock(folder / lock_name, blocking=False, mode=0o600)
                except BlockingIOError as error:
                    raise SandboxError(f"--state {folder}: another server uses it") from error
                path = str(folder / file_name)
                os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
            self.connection = _open(path, schema_version, schema)
        except (OSError, sqlite3.Error) as error:
            self._unlock()
            raise SpecRefused(f"--state {folder}: {error}") from error

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def close(self) -> None:
        self.connection.close()
        self._unlock()


def _open(path: str, schema_version: int, schema: Sequence[str]) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, schema_version):
        database.close()
        raise OSError(f"schema {version} is not supported; this version has schema {schema_version}")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    for statement in schema:
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {schema_version}")
    return database
