"""Directories of a run: the paths of its files. `status`, `report` and `resume` need nothing else.

Invariants:
- `state` is on a local disk of the node that has the ledger; `storage` is seen by all nodes and may be a network disk.
  Without a cluster both are one folder.
- A state folder names its storage in the file `storage`, so that its path is enough to find both.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import orjson

from headrace.actors.errors import RunMissing
from headrace.buffer.primitives.durable_files import append_line, replace_file
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.tasks.task import Task, write_tasks
from headrace.sandboxes.host.leftovers import IDENTITY_FILE, run_label

STORAGE_POINTER: Final = "storage"
"""File in a state folder that holds the path of the run's storage folder."""


def free_folder(parent: Path, stem: str) -> Path:
    """Return the first of `parent/stem-1`, `parent/stem-2`, ... that does not exist."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Paths of a run's files by name; the guide 'Run directory' describes their content. `path` is the state folder;
    without `shared`, it is the storage folder too."""

    path: Path
    shared: Path | None = None

    @classmethod
    def at(cls, path: Path) -> Self:
        """Return the directory of the run whose state folder this is."""
        state = path.resolve()
        pointer = state / STORAGE_POINTER
        return cls(path=state, shared=Path(pointer.read_text()) if pointer.exists() else None)

    @property
    def storage(self) -> Path:
        """The folder that all nodes see."""
        return self.shared or self.path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.storage / "config.json"

    @property
    def train_tasks(self) -> Path:
        return self.storage / "tasks" / "train.jsonl"

    @property
    def heldout_tasks(self) -> Path:
        return self.storage / "tasks" / "heldout.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.storage / "checkpoints"

    @property
    def weights(self) -> Path:
        """The snapshots that engines load."""
        return self.storage / "weights"

    @property
    def evaluations(self) -> Path:
        return self.storage / "evaluations"

    @property
    def engines(self) -> Path:
        """The engines and the state of each, as their group last recorded them."""
        return self.path / "engines" / "members.json"

    @property
    def engine_key(self) -> Path:
        """The key of the run's engines; readable on every host with an engine or a gateway."""
        return self.storage / "engines" / "key"

    @property
    def engine_requests(self) -> Path:
        """Requests of operators to the engines (`headrace engine add`), and the answers."""
        return self.path / "engines" / "requests"

    @property
    def logs(self) -> Path:
        """One JSON line for each event that an actor logs, in a file for each of its processes."""
        return self.path / "logs"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        return self.path / "reward.png"

    @property
    def sandboxes(self) -> Path:
        """The pool's table of sandboxes; it contains their secrets."""
        return self.path / "sandboxes"

    @property
    def sessions(self) -> Path:
        """One JSON object for each start and each end of a driver, with both times (Unix time; the end is null at
        first)."""
        return self.path / "sessions.jsonl"

    @property
    def identity(self) -> Path:
        """Identity of the run in its ledger; it does not change when the directory is moved or renamed."""
        return self.path / IDENTITY_FILE

    @property
    def lock(self) -> Path:
        """Lock file of the driving process; its existence alone means nothing."""
        return self.path / "driver.lock"

    def write_beginning(self, train: Iterable[Task], identity: str) -> None:
        """Write the data that a buffer needs at startup: the training tasks and the identity of the run. Raises
        OSError."""
        self.train_tasks.parent.mkdir(parents=True)
        write_tasks(self.train_tasks, train)
        self.identity.write_text(identity)

    def write_state(self) -> None:
        """Create the state folder of a run whose storage folder exists. Idempotent. Raises OSError, RunMissing."""
        assert self.shared is not None
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / STORAGE_POINTER, str(self.shared).encode())
        replace_file(self.identity, RunDirectory(path=self.shared).run_id().encode())

    def run_id(self) -> str:
        """Return the identity of the run. Raises RunMissing if the identity file is missing, as after an incomplete
        copy."""
        try:
            return self.identity.read_text()
        except OSError as error:
            raise RunMissing(
                f"{self.identity} cannot be read ({error.strerror}): the copy of the run is incomplete; copy all of it"
            ) from error

    def append_session(self, started_s: float, ended_s: float | None) -> None:
        """Record that a driver has started (`ended_s` None) or ended."""
        append_line(self.sessions, orjson.dumps({"started_s": started_s, "ended_s": ended_s}) + b"\n")

    def driver_pid(self) -> int | None:
        """Return the id of the process that is driving the run; None if there is none or it has not been recorded
        yet."""
        if not self.is_driven():
            return None
        text = self.lock.read_text()
        return int(text) if text.isdigit() else None

    def is_driven(self) -> bool:
        """Return True while a live process is driving this run."""
        if not self.lock.exists():
            return False
        try:
            try:
                FileLock(self.lock, blocking=False).release()
            except OSError as error:
                if error.errno not in (errno.EROFS, errno.EACCES):
                    raise
                # The run of another user, or on a read-only disk: a descriptor for reading can be locked, too.
                FileLock(os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC), blocking=False).release()
        except BlockingIOError:
            return True
        return False


def identity_of(directory: RunDirectory) -> str:
    """Return what distinguishes a run's traces from those of others: its id, or its path while it has none."""
    return directory.run_id() if directory.identity.exists() else str(directory.path)


def sandbox_owner(directory: RunDirectory) -> str:
    """Return the label of the run's sandboxes. On a cluster it depends on the run's id alone, since another node
    may continue the run in another folder; a local launcher belongs to one folder of one host."""
    if directory.shared is None:
        return run_label(directory.path)
    return hashlib.sha256(directory.run_id().encode()).hexdigest()[:16]


def read_configuration(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the content of a run's config.json, as the version wrote it that started or changed the run; None if
    there is none. Raises OSError, ValueError."""
    try:
        document: dict[str, Any] = orjson.loads(directory.config.read_bytes())
    except FileNotFoundError:
        return None
    return document
