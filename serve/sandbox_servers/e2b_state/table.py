"""Durable table of a server's sandboxes and snapshots.

Invariants:
- A row is written before its sandbox boots and removed once the sandbox is dead, so a restarted server knows all
  sandboxes that may be alive.
- The file is a `ServerDatabase`: of mode 0600 in a folder of mode 0700, locked, and in memory if there is no folder.
- Nothing is lost if the server crashes. Rows are not fsynced one by one, because a crash of the machine ends the
  sandboxes as well. A call takes well under a millisecond.
- Without a folder, the database is lost when the server ends. A file with another schema is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

import orjson

from headrace.buffer.primitives.database import stamp_of, write_stamp
from headrace.buffer.primitives.file_lock import FileLock
from headrace.sandboxes.base import SandboxId, SandboxRef
from headrace.sandboxes.errors import SandboxError, SpecRefused
from headrace.sandboxes.host.private_folders import make_missing

_STAMP: Final = (0x48525353, 1)
"""`HRSS`, and the number of the schema: this SQLite file is of a sandbox server."""
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, row BLOB NOT NULL) STRICT",
    "CREATE TABLE IF NOT EXISTS snapshots (id TEXT PRIMARY KEY, row BLOB NOT NULL) STRICT",
    "CREATE TABLE IF NOT EXISTS templates (id TEXT PRIMARY KEY, row BLOB NOT NULL) STRICT",
)


class State(StrEnum):
    """State of a sandbox. A dead one has no row."""

    BOOTING = "booting"
    """The sandbox has been requested and may exist; clients do not see it."""
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sandbox. Times are in Unix seconds."""

    id: str
    owner: str
    boot_key: str
    """The idempotency key for the provider."""
    template: str
    image: str
    access_token: str = field(repr=False)
    timeout_s: float
    started_at: float
    end_at: float
    state: State = State.BOOTING
    ref: SandboxRef | None = None
    pause_at_end: bool = False
    auto_resume: bool = False
    """Resume the sandbox for a request that finds it paused."""
    guest: bool = False
    """True if the sandbox has the account and the files that E2B's clients expect."""
    sudo: bool = False
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    processes: int | None = None
    cpus: int | None = None
    """Limits of its key, which the provider is asked for."""
    lifetime_s: int | None = None
    """Longest time from now for which its key may keep it."""
    secure: bool = False
    """True if the sandbox's ports need one of its secrets."""
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict, repr=False)
    client_key: str = ""
    """The client's Idempotency-Key."""
    request_digest: str = ""
    """Digest of the request body that came with the key."""
    user: str = ""
    """User of the commands of clients that name none; "" for the server's default."""
    folder: str = ""
    """Folder of commands that name none; "" for the user's own."""
    start_command: str = field(default="", repr=False)
    ready_command: str = field(default="", repr=False)

    @property
    def traffic_token(self) -> str:
        """The secret for the sandbox's ports; it gives no access to envd."""
        return hmac.new(self.access_token.encode(), b"ports", hashlib.sha256).hexdigest()

    @property
    def base_env(self) -> dict[str, str]:
        """Variables of every command, which E2B's sandboxes have."""
        return {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": self.id, "E2B_TEMPLATE_ID": self.template}


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An image made of a sandbox; `id` is the template that boots it."""

    id: str
    owner: str
    image: str
    name: str
    sandbox_id: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateBuild:
    """A finished build of a template, whose image has the name `image` in the catalogue."""

    id: str
    image: str
    size_bytes: int
    created_at: float
    finished_at: float
    user: str = ""
    folder: str = ""
    start_command: str = ""
    ready_command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A template with at least one finished build. `tags` maps each tag to the id of a build."""

    id: str
    owner: str
    name: str
    builds: tuple[TemplateBuild, ...]
    tags: dict[str, str]
    tagged_at: dict[str, float]
    created_at: float
    updated_at: float
    cpu_count: int = 0
    memory_mb: int = 0
    spawn_count: int = 0
    last_spawned_at: float | None = None


class SandboxTable:
    """Table of rows on disk or in memory; the caller must `close` it."""

    def __init__(self, folder: Path | None) -> None:
        """Open the table. Raises SandboxError if another server uses the folder, SpecRefused if it is unusable."""
        names = {"file_name": "sandboxes.db", "lock_name": "lock"}
        self._file = ServerDatabase(folder, **names, schema=_SCHEMA)
        self._database = self._file.connection

    def put(self, row: Row) -> None:
        """Insert or replace a row."""
        self._database.execute("INSERT OR REPLACE INTO sandboxes VALUES (?, ?)", (row.id, orjson.dumps(asdict(row))))

    def drop(self, sandbox_id: str) -> None:
        self._database.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))

    def rows(self) -> list[Row]:
        """Return all rows, by id."""
        rows = []
        for (blob,) in self._database.execute("SELECT row FROM sandboxes ORDER BY id"):
            document = orjson.loads(blob)
            if (ref := document["ref"]) is not None:
                document["ref"] = SandboxRef(**{**ref, "id": SandboxId(ref["id"])})
            rows.append(Row(**{**document, "state": State(document["state"])}))
        return rows

    def put_snapshot(self, snapshot: Snapshot) -> None:
        values = (snapshot.id, orjson.dumps(asdict(snapshot)))
        self._database.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", values)

    def drop_snapshot(self, snapshot_id: str) -> None:
        self._database.execute("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))

    def snapshots(self, owner: str) -> list[Snapshot]:
        """Return an owner's snapshots, oldest first."""
        blobs: Iterable[tuple[bytes]] = self._database.execute("SELECT row FROM snapshots ORDER BY id")
        found = [Snapshot(**orjson.loads(blob)) for (blob,) in blobs]
        return sorted((one for one in found if one.owner == owner), key=lambda one: (one.created_at, one.id))

    def put_template(self, template: Template) -> None:
        """Insert or replace a template."""
        values = (template.id, orjson.dumps(asdict(template)))
        self._database.execute("INSERT OR REPLACE INTO templates VALUES (?, ?)", values)

    def drop_template(self, template_id: str) -> None:
        self._database.execute("DELETE FROM templates WHERE id = ?", (template_id,))

    def templates(self) -> list[Template]:
        """Return the templates of all owners."""
        found = []
        for (blob,) in self._database.execute("SELECT row FROM templates ORDER BY id"):
            document = orjson.loads(blob)
            document["builds"] = tuple(TemplateBuild(**build) for build in document["builds"])
            found.append(Template(**document))
        return found

    def close(self) -> None:
        self._file.close()


class ServerDatabase:
    """An open database, whose `connection` commits every statement; the caller must `close` it."""

    def __init__(self, folder: Path | None, *, file_name: str, lock_name: str, schema: Sequence[str]) -> None:
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
            database = sqlite3.connect(path, isolation_level=None)
            if stamp_of(database) not in ((0, 0), _STAMP):
                database.close()
                raise OSError(f"{file_name} is of an unreleased version of headrace: move it away")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            for statement in schema:
                database.execute(statement)
            write_stamp(database, _STAMP)
            self.connection = database
        except (OSError, sqlite3.Error) as error:
            self._unlock()
            raise SpecRefused(f"--state {folder}: {error}") from error

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def close(self) -> None:
        self.connection.close()
        self._unlock()
