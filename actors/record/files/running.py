"""The rollouts that each worker is running, in small files that outlive it: `running/WORKER.json` in the run's state.

Invariants:
- A file is replaced as a whole, so a reader sees one moment; it is at most `EVERY_S` older than its worker's death.
- Times are seconds since 1970 by the clock of the worker's host.
- A file says what ran, not that it still runs: the ledger decides which attempts have ended.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

import orjson

from headrace.actors.record.files.node_copies import folders_of_nodes

EVERY_S: Final = 2.0
"""Seconds between two writes of a worker's file."""
FOLDER: Final = "running"
"""Name of the folder in the run's state."""
MAX_FILES: Final = 4096
"""Files of workers kept in a run; older ones of dead workers are removed. Far more than a run has workers at once."""
STUCK: Final = 3.0
"""A rollout that has taken more than this times the 95th percentile of its cohort is stuck."""
FEW: Final = 8
"""Number of ended attempts below which a task is no cohort of its own."""

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
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / f".{file.worker}.{os.getpid()}"
    staged.write_bytes(file.to_bytes())
    staged.replace(folder / f"{file.worker}.json")


def remove_oldest_running(folder: Path) -> None:
    """Remove all but the newest `MAX_FILES` files: a worker that is replaced leaves its own behind. Raises OSError."""
    # Another worker may remove the same files.
    found = [(path, path.stat().st_mtime) for path in folder.glob("*.json") if path.exists()]
    for path, _ in sorted(found, key=lambda each: each[1])[:-MAX_FILES]:
        path.unlink(missing_ok=True)


def read_running(folder: Path) -> list[RunningFile]:
    """Return the files of all workers in a folder of a run and in its copies from other nodes, the newest last. A
    damaged file is named in the log and left out."""
    found = []
    for path in sorted(path for each in folders_of_nodes(folder).values() for path in each.glob("*.json")):
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
