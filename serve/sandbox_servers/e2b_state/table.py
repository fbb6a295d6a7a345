"""Durable tables of a server's sandboxes, snapshots and templates.

Invariants:
- A row is written before its sandbox boots and removed once the sandbox is dead, so a restarted server knows all
  sandboxes that may be alive.
- Nothing is lost if the server crashes. Rows are not fsynced one by one, because a crash of the machine ends the
  sandboxes as well. A call takes well under a millisecond.
- The file is in a folder of mode 0700. Without a folder, the tables are lost when the server ends.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from headrace.buffer.primitives.tables import TableError, TableFile
from headrace.sandboxes.base import SandboxRef
from headrace.sandboxes.errors import SpecRefused
from headrace.sandboxes.host.private_folders import make_missing

_STAMP: Final = (0x48525353, 2)
"""`HRSS`, and the number of the schema: this SQLite file is of a sandbox server."""


class State(StrEnum):
    """State of a sandbox. A dead one has no row."""

    BOOTING = "booting"
    """The sandbox has been requested and may exist; clients do not see it."""
    RUNNING = "running"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRow:
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
class SandboxSnapshot:
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


@contextmanager
def opening(folder: Path | None, name: str) -> Iterator[TableFile]:
    """Open a file of a server's tables, in memory if there is no folder; the block opens the tables. Raises SpecRefused
    for what is wrong with the folder, the file or a table."""
    try:
        if folder is not None:
            make_missing(folder)
        yield TableFile(folder and folder / name, _STAMP)
    except (TableError, OSError) as error:
        raise SpecRefused(f"--state {folder}: {error}") from error


class SandboxTables:
    """Tables of the E2B server; the caller must `close` them."""

    def __init__(self, folder: Path | None) -> None:
        """Open the tables. Raises SpecRefused if the folder is unusable or another server uses it."""
        with opening(folder, "sandboxes.db") as self._file:
            self.sandboxes = self._file.table("sandboxes", SandboxRow, "id")
            self.snapshots = self._file.table("snapshots", SandboxSnapshot, "owner", "id")
            self.templates = self._file.table("templates", Template, "id")

    def close(self) -> None:
        self._file.close()
