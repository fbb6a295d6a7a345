"""Durable table of the sandboxes that a server leases to its clients.

Invariants:
- A row is written before a client gets its sandbox, so a restarted server knows all leased sandboxes. A sandbox that
  has no row after a crash ends with its lease, or is found by its key.
- The file is a `ServerDatabase`: private, for one server at a time, and in memory without a folder.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.sandboxes.base import SandboxId, SandboxRef
from headrace.serve.e2b_sandboxes.table import ServerDatabase

if TYPE_CHECKING:
    from pathlib import Path

_SCHEMA_VERSION: Final = 1
_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS lent (id TEXT PRIMARY KEY, row BLOB NOT NULL) STRICT",
    "CREATE TABLE IF NOT EXISTS snapshots (image TEXT PRIMARY KEY, owner TEXT NOT NULL, source TEXT NOT NULL) STRICT",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Additional properties of a sandbox in the drop-in contract; `created_at` is in Unix seconds."""

    name: str
    cwd: str
    created_at: float
    lease_id: str = ""
    instance_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSandbox:
    """One leased sandbox. `secret` opens it through this server; `ref` is the provider's."""

    id: SandboxId
    owner: str
    secret: str = field(repr=False)
    ref: SandboxRef
    image: str
    container: Container | None = None


class LeasedSandboxTable:
    """Rows in memory and on disk; `close` it."""

    def __init__(self, folder: Path | None) -> None:
        """Open the table. Raises SandboxError if another server uses the folder, SpecRefused if it is unusable."""
        names = {"file_name": "lent.db", "lock_name": "lent.lock"}
        self._file = ServerDatabase(folder, **names, schema_version=_SCHEMA_VERSION, schema=_SCHEMA)
        self._database = self._file.connection
        loaded = (_row(orjson.loads(blob)) for (blob,) in self._database.execute("SELECT row FROM lent"))
        self._rows = {row.id: row for row in loaded}

    def put(self, row: LeasedSandbox) -> None:
        self._rows[row.id] = row
        self._database.execute("INSERT OR REPLACE INTO lent VALUES (?, ?)", (row.id, orjson.dumps(asdict(row))))

    def get(self, sandbox: str) -> LeasedSandbox | None:
        return self._rows.get(SandboxId(sandbox))

    def drop(self, sandbox: str) -> None:
        """Remove a row. Idempotent."""
        if self._rows.pop(SandboxId(sandbox), None) is not None:
            self._database.execute("DELETE FROM lent WHERE id = ?", (sandbox,))

    def rows(self) -> list[LeasedSandbox]:
        return list(self._rows.values())

    def put_snapshot(self, image: str, owner: str, source: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)", (image, owner, source))

    def snapshots(self, owner: str) -> dict[str, str]:
        """Return the snapshots of an owner, by the sandbox of which they were made."""
        query = "SELECT source, image FROM snapshots WHERE owner = ? ORDER BY rowid"
        return dict(self._database.execute(query, (owner,)))

    def close(self) -> None:
        self._file.close()


def _row(document: dict[str, Any]) -> LeasedSandbox:
    ref = document.pop("ref")
    container = document.pop("container")
    return LeasedSandbox(
        **{**document, "id": SandboxId(document["id"])},
        ref=SandboxRef(**{**ref, "id": SandboxId(ref["id"])}),
        container=None if container is None else Container(**container),
    )
