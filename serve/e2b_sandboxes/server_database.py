"""A server's durable table: one SQLite file with secrets in a folder of its own, or memory.

Invariants:
- The file has mode 0600 in a folder of mode 0700, and one server at a time (a lock).
- A crash of the server loses nothing; a crash of the machine takes the sandboxes with it, so rows are not fsynced one
  by one. A call takes well under a millisecond.
- Without a folder the table ends with the server. A file of another schema is refused.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from typing import TYPE_CHECKING

from headrace.sandboxes.errors import SandboxError, SpecRefused
from headrace.sandboxes.private_folders import make_missing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class ServerDatabase:
    """`connection` commits every statement. Close it with `close`."""

    def __init__(
        self, folder: Path | None, *, file_name: str, lock_name: str, schema_version: int, schema: Sequence[str]
    ) -> None:
        """Raises SandboxError when another server uses the folder, SpecRefused when it cannot be used."""
        self._lock = -1
        try:
            path = ":memory:" if folder is None else self._take(folder, file_name, lock_name)
            self.connection = _open(path, schema_version, schema)
        except (OSError, sqlite3.Error) as error:
            self._unlock()
            raise SpecRefused(f"--state {folder}: {error}") from error

    def _take(self, folder: Path, file_name: str, lock_name: str) -> str:
        make_missing(folder)
        self._lock = os.open(folder / lock_name, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise SandboxError(f"--state {folder}: another server uses it") from error
        path = str(folder / file_name)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        return path

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def close(self) -> None:
        self.connection.close()
        self._unlock()


def _open(path: str, schema_version: int, schema: Sequence[str]) -> sqlite3.Connection:
    database = sqlite3.connect(path, isolation_level=None)
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, schema_version):
        database.close()
        raise OSError(f"schema {version}, this program knows {schema_version}")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    for statement in schema:
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {schema_version}")
    return database
