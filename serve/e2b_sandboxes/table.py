"""Durable table of a server's sandboxes and snapshots.

Invariants:
- A row is written before its sandbox boots and removed once it is dead, so a restarted server knows all sandboxes that
  may be alive.
- The file is a `ServerDatabase`: private, for one server at a time, and in memory without a folder.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.sandboxes.base import SandboxId, SandboxRef
from headrace.serve.e2b_sandboxes.server_database import ServerDatabase

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS sandboxes (id TEXT PRIMARY KEY, row BLOB NOT NULL) STRICT",
    "CREATE TABLE IF NOT EXISTS snapshots (id TEXT PRIMARY KEY, row BLOB NOT NULL) STRICT",
)


class State(StrEnum):
    """State of a sandbox. A dead one has no row."""

    BOOTING = "booting"
    """It was requested and may exist; clients do not see it."""
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
    metadata: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict, repr=False)
    client_key: str = ""
    """The client's Idempotency-Key."""
    request_digest: str = ""
    """Digest of the request body that came with the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An image made of a sandbox; `id` is the template that boots it."""

    id: str
    owner: str
    image: str
    name: str
    sandbox_id: str
    created_at: float


class SandboxTable:
    """Rows on disk, or in memory; `close` it."""

    def __init__(self, folder: Path | None) -> None:
        """Open the table. Raises SandboxError if another server uses the folder, SpecRefused if it is unusable."""
        names = {"file_name": "sandboxes.db", "lock_name": "lock"}
        self._file = ServerDatabase(folder, **names, schema_version=_SCHEMA_VERSION, schema=_SCHEMA)
        self._database = self._file.connection

    def put(self, row: Row) -> None:
        """Write or replace a row."""
        self._database.execute("INSERT OR REPLACE INTO sandboxes VALUES (?, ?)", (row.id, orjson.dumps(asdict(row))))

    def drop(self, sandbox_id: str) -> None:
        self._database.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))

    def rows(self) -> list[Row]:
        return [_row(orjson.loads(blob)) for (blob,) in self._database.execute("SELECT row FROM sandboxes ORDER BY id")]

    def put_snapshot(self, snapshot: Snapshot) -> None:
        values = (snapshot.id, orjson.dumps(asdict(snapshot)))
        self._database.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?)", values)

    def drop_snapshot(self, snapshot_id: str) -> None:
        self._database.execute("DELETE FROM snapshots WHERE id = ?", (snapshot_id,))

    def snapshots(self, owner: str) -> list[Snapshot]:
        """Return the snapshots of an owner, oldest first."""
        blobs: Iterable[tuple[bytes]] = self._database.execute("SELECT row FROM snapshots ORDER BY id")
        found = [Snapshot(**orjson.loads(blob)) for (blob,) in blobs]
        return sorted((one for one in found if one.owner == owner), key=lambda one: (one.created_at, one.id))

    def close(self) -> None:
        self._file.close()


def _row(document: dict[str, Any]) -> Row:
    ref = document.pop("ref")
    document["state"] = State(document["state"])
    if ref is not None:
        ref = SandboxRef(**{**ref, "id": SandboxId(ref["id"])})
    return Row(**document, ref=ref)
