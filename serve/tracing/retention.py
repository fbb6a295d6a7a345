"""Retention of a run's records: growing files are rotated when they reach a size limit, and the oldest are removed.

Invariants:
- `NAME.jsonl` is the newest file; `NAME-000001.jsonl`, `NAME-000002.jsonl`, ... are older ones, oldest first.
- Several processes may append to one file (each write is a single O_APPEND write) and rotate it: one process at a time
  rotates it, and the others continue with the new file. (The standard library's rotating handlers support one process
  only.)
- Only rotated files are removed, never the one that is being written to.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import Field

from headrace.buffer.primitives.durable_files import append_line
from headrace.buffer.primitives.file_lock import FileLock
from headrace.buffer.primitives.sections import Section

DAY_S = 86400.0
LINE_BYTES = 1 << 24
"""Length from which a line without an end is no longer waited for: no record is that long."""
OLDER = re.compile(r"-\d{6,}$")


class RetentionConfig(Section):
    """Limits for metrics, pushes, logs and evaluations. Spans, trajectories and checkpoints have limits of their own
    (`telemetry.keep_bytes`, `buffer.keep_trajectories`, `learner.keep_checkpoints`)."""

    file_bytes: int = Field(default=64 * 2**20, ge=4096)
    """Size at which `metrics.jsonl`, `engines/pushes.jsonl` and the logs of actors, engines and senders are rotated."""
    metrics_bytes: int = Field(default=2**30, ge=4096)
    """Limit for the total size of the older files of `metrics.jsonl`; beyond it, the oldest are removed. Only `report`
    and the plot use these files, and then cover only what is left of them."""
    log_bytes: int = Field(default=2**28, ge=4096)
    """Limit for the total size of the older files of each log, and of `engines/pushes.jsonl`."""
    evaluations_bytes: int = Field(default=2**33, ge=4096)
    """Limit for the total size of the folders of finished evaluations; beyond it, the conversations and patches of the
    oldest are removed. Their results and summaries remain."""
    days: float = Field(default=365.0, gt=0)
    """Age at which any of these files is removed, whatever its size."""

    @classmethod
    def beside(cls, span_bytes: int) -> Self:
        """Return the limits of a run whose spans may take `span_bytes`, in proportion."""
        return cls(
            file_bytes=max(4096, span_bytes // 16),
            metrics_bytes=span_bytes,
            log_bytes=max(4096, span_bytes // 4),
            evaluations_bytes=8 * span_bytes,
        )


class RotatingFile:
    """Append-only file that is rotated by size. Without a `retention`, it grows without limit. `keep_bytes` limits the
    total size of the older files; None means `metrics_bytes`."""

    def __init__(self, path: Path, retention: RetentionConfig | None, *, keep_bytes: int | None = None) -> None:
        self._path, self._retention = path, retention
        self._keep_bytes = keep_bytes

    def append(self, line: bytes) -> None:
        """Append a line in a single write, and rotate the file if it is full. Raises OSError."""
        if self.write(line):
            self.rotate()

    def write(self, line: bytes) -> bool:
        """Append a line in a single write, and return True if the file is then due to be rotated. Raises OSError, also
        if only a part of the line could be written."""
        size_bytes = append_line(self._path, line)
        return self._retention is not None and size_bytes >= self._retention.file_bytes

    def rotate(self) -> None:
        """Start a new file if this one is full, and remove older files beyond the limits. Raises OSError."""
        assert self._retention is not None
        with FileLock(self._path.with_name(f".{self._path.name}.lock"), mode=0o644):
            # Another process may have been faster.
            if self._path.exists() and self._path.stat().st_size >= self._retention.file_bytes:
                self._path.rename(next_older_file(self._path))
            keep_bytes = self._retention.metrics_bytes if self._keep_bytes is None else self._keep_bytes
            remove_oldest(older_files(self._path), keep_bytes, self._retention.days)


def older_files(path: Path) -> list[Path]:
    """Return the rotated files, oldest first."""
    numbered = re.compile(re.escape(path.stem) + r"-(\d{6,})")
    found = path.parent.glob(f"{path.stem}-*{path.suffix}") if path.parent.is_dir() else ()
    matches = ((numbered.fullmatch(each.stem), each) for each in found)
    return [each for _, each in sorted((int(match.group(1)), each) for match, each in matches if match)]


def is_older_file(path: Path) -> bool:
    """Return whether the path belongs to a rotated file."""
    return OLDER.search(path.stem) is not None


def next_older_file(path: Path) -> Path:
    """Return the path that the file at `path` gets when it is rotated."""
    older = older_files(path)
    number = int(older[-1].stem.rpartition("-")[2]) + 1 if older else 1
    return path.with_name(f"{path.stem}-{number:06d}{path.suffix}")


def kept_files(path: Path) -> list[Path]:
    """Return all files, oldest first; the newest is the one at `path`."""
    return [*older_files(path), *([path] if path.exists() else [])]


def remove_oldest(paths: Iterable[Path], keep_bytes: int, keep_days: float) -> tuple[Path, ...]:
    """Remove the files that are older than `keep_days` or exceed the total of `keep_bytes`. `paths` must be sorted,
    oldest first."""
    removed = []
    left_bytes, since_s = keep_bytes, time.time() - keep_days * DAY_S
    for path in reversed(list(paths)):
        try:
            found = path.stat()
            left_bytes -= found.st_size
            if left_bytes < 0 or found.st_mtime < since_s:
                path.unlink()
                removed.append(path)
        except FileNotFoundError:
            continue
    return tuple(removed)


class Tail:
    """New lines of a file that is rotated, and of its older files, each once: a rotation between two readings loses and
    repeats nothing. Of the files that exist at first, only the `newest` are read (None: all)."""

    def __init__(self, path: Path, *, newest: int | None = None) -> None:
        self._path, self._newest = path, newest
        self._offsets: dict[int, int] = {}
        self._listed: set[int] = set()

    def lines(self) -> Iterator[bytes]:
        """Yield what was written since the last call, line by line. A line without its end comes when it is complete,
        unless it has `LINE_BYTES`. Raises OSError."""
        files = []
        for path in kept_files(self._path):
            with suppress(FileNotFoundError):
                found = path.stat()
                files.append((path, found.st_ino, found.st_size))
        if not self._offsets and self._newest is not None:
            self._offsets = {number: size for _, number, size in files[: -self._newest]}
        listed = {number for _, number, _ in files}
        # A removed file's number may be that of a new one; a file that is renamed now is in no list, but in the next.
        known = {number: offset for number, offset in self._offsets.items() if number in listed | self._listed}
        self._offsets, self._listed = dict.fromkeys(listed, 0) | known, listed
        for path, number, _ in files:
            # A file that has vanished since was removed, or renamed: the next call finds it.
            with suppress(FileNotFoundError), path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != number:
                    # A rotation since the list was made: the next call continues from here.
                    return
                if found.st_size < self._offsets[number]:
                    self._offsets[number] = 0
                file.seek(self._offsets[number])
                while line := file.readline(LINE_BYTES):
                    if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                        break
                    self._offsets[number] += len(line)
                    yield line
