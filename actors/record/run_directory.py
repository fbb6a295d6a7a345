"""The directory of a run: everything of it lies here, and `status` and `resume` need nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from headrace.actors.errors import RunMissing
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.tasks import write_tasks
from headrace.sandboxes.leftovers import IDENTITY_FILE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from headrace.buffer.tasks import Task


def free_folder(parent: Path, stem: str) -> Path:
    """`parent/stem-1`, `parent/stem-2`, ...: the first that is free."""
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Paths by name."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.json"

    @property
    def train_tasks(self) -> Path:
        return self.path / "tasks" / "train.jsonl"

    @property
    def heldout_tasks(self) -> Path:
        return self.path / "tasks" / "heldout.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def engines(self) -> Path:
        """The engines and how each is, as their group last said."""
        return self.path / "engines" / "members.json"

    @property
    def engine_requests(self) -> Path:
        """What operators ask of the engines, and the answers."""
        return self.path / "engines" / "requests"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        return self.path / "reward.png"

    @property
    def sandboxes(self) -> Path:
        """The pool's sandbox ledger; it holds secrets of sandboxes."""
        return self.path / "sandboxes"

    @property
    def sessions(self) -> Path:
        """One JSON object per driver that began, and one more when it ended: start and end (null), Unix time."""
        return self.path / "sessions.jsonl"

    @property
    def identity(self) -> Path:
        """What the ledger knows the run by; stays the same when the directory is moved or renamed."""
        return self.path / IDENTITY_FILE

    @property
    def lock(self) -> Path:
        """Held by the driving process; says nothing by its existence."""
        return self.path / "driver.lock"

    def write_beginning(self, train: Sequence[Task], identity: str) -> None:
        """What a buffer begins from: the training tasks, and what the ledger knows the run by. Raises OSError."""
        self.train_tasks.parent.mkdir(parents=True)
        write_tasks(self.train_tasks, train)
        self.identity.write_text(identity)

    def run_id(self) -> str:
        """What `identity` holds. Raises RunMissing where it was not copied."""
        try:
            return self.identity.read_text()
        except OSError as error:
            raise RunMissing(
                f"{self.identity} cannot be read: {error.strerror}: the run was copied in part; copy all of it"
            ) from error

    def append_session(self, started_s: float, ended_s: float | None) -> None:
        """Record when a driver began, and again when it ended."""
        with self.sessions.open("ab") as file:
            file.write(orjson.dumps({"started_s": started_s, "ended_s": ended_s}) + b"\n")

    def driver_pid(self) -> int | None:
        """The process on this host that drives the run now."""
        if not self.is_driven():
            return None
        text = self.lock.read_text()
        return int(text) if text.isdigit() else None

    def is_driven(self) -> bool:
        """Whether a live process drives this run."""
        if not self.lock.exists():
            return False
        try:
            FileLock(self.lock, blocking=False).release()
        except BlockingIOError:
            return True
        return False
