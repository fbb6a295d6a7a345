"""The newest records of a run's `metrics.jsonl`, read as they are written.

Invariants:
- The position is a file and an offset in it, so a rotation between two readings loses and repeats nothing.
- A line without its end is read when it is complete; one that is not a record is counted and skipped.
- Of the older files, only the newest is read at first: gauges need the newest records, and a run may keep a gigabyte.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.serve.observing.retention import kept_files

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

LINE_BYTES: Final = 1 << 24
"""Length from which a line without an end is skipped: no record is that long."""


class NewestRecords:
    """Newest record of each of some kinds. `bad_lines` counts the lines that are not records."""

    def __init__(self, path: Path, kinds: Collection[str]) -> None:
        self._path, self._kinds = path, frozenset(kinds)
        self._file: int | None = None
        self._offset = 0
        self.newest: dict[str, dict[str, Any]] = {}
        self.bad_lines = 0

    def update(self) -> None:
        """Read what was written since the last call; at first, the newest two files. Raises OSError."""
        files = []
        for path in kept_files(self._path):
            with suppress(FileNotFoundError):
                files.append((path, path.stat().st_ino))
        numbers = [number for _, number in files]
        if self._file is None:
            files = files[-2:]
        elif self._file in numbers:
            files = files[numbers.index(self._file) :]
        for path, number in files:
            # A rotation since the list was made: the next call continues from here.
            if not self._read(path, number):
                break

    def _read(self, path: Path, number: int) -> bool:
        """Read the rest of a file. Return False if the path no longer leads to file `number`."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return False
        with file:
            found = os.fstat(file.fileno())
            if found.st_ino != number:
                return False
            if number != self._file or found.st_size < self._offset:
                self._file, self._offset = number, 0
            file.seek(self._offset)
            while line := file.readline(LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                    break
                self._offset += len(line)
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    record = None
                if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
                    self.bad_lines += 1
                elif record["kind"] in self._kinds:
                    self.newest[record["kind"]] = record
        return True
