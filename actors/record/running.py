"""The rollouts that each worker is running, in small files that outlive it: `running/WORKER.json` in the run's state.

Invariants:
- A file is replaced as a whole, so a reader sees one moment; it is at most `EVERY_S` older than its worker's death.
- Times are seconds since 1970 by the clock of the worker's host.
- A file says what ran, not that it still runs: the ledger decides which attempts have ended.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Self

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

EVERY_S: Final = 2.0
"""Seconds between two writes of a worker's file."""
FOLDER: Final = "running"
"""Name of the folder in the run's state."""
MAX_FILES: Final = 64
"""Files of workers kept in a run; the oldest of dead workers are removed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRollout:
    """An attempt that a worker is running: since `started_s`, and in `part` of it since `part_since_s`."""

    rollout_id: str
    attempt: int
    task: str
    purpose: str
    agent: str
    host: str
    part: str
    started_s: float
    part_since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningFile:
    """What one worker process was running at `written_s`."""

    worker: str
    node: str
    pid: int
    written_s: float
    rollouts: tuple[RunningRollout, ...]

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        return orjson.dumps(asdict(self))

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Parse the result of `to_bytes`. Raises ValueError, KeyError, TypeError."""
        document = orjson.loads(content)
        rollouts = tuple(RunningRollout(**each) for each in document["rollouts"])
        return cls(**document | {"rollouts": rollouts})


def write_running(folder: Path, file: RunningFile) -> None:
    """Replace a worker's file. Raises OSError."""
    store_running(folder, file.worker, file.to_bytes())


def store_running(folder: Path, worker: str, content: bytes) -> None:
    """Replace a worker's file by one that was read elsewhere. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path, staged = folder / f"{worker}.json", folder / f".{worker}.{os.getpid()}"
    staged.write_bytes(content)
    staged.replace(path)


def remove_oldest_running(folder: Path) -> None:
    """Remove files of workers that have been replaced many times."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
    for path in paths[:-MAX_FILES]:
        path.unlink(missing_ok=True)


def read_running(folder: Path) -> list[RunningFile]:
    """Return the files of all workers, the newest last. A damaged file is named in the log and left out."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            found.append(RunningFile.parse(path.read_bytes()))
        except FileNotFoundError:
            continue
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is damaged (%r); its rollouts are not listed", path, error)
    return sorted(found, key=lambda file: file.written_s)


def newest(files: Iterable[RunningFile]) -> dict[tuple[str, int], tuple[RunningFile, RunningRollout]]:
    """Return the newest word on each attempt, by rollout and attempt."""
    return {(each.rollout_id, each.attempt): (file, each) for file in files for each in file.rollouts}
