"""Exclusive locks between processes on files and folders, with flock(2).

Invariants:
- A lock belongs to an open descriptor: the kernel releases the lock when the descriptor is closed, hence also when the
  process dies.
- No program that this process starts inherits the descriptor (close-on-exec).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Self


class FileLock:
    """An exclusive lock, held from construction until `release` or the end of a `with` block."""

    def __init__(self, file: Path | int, *, blocking: bool = True, mode: int = 0o666) -> None:
        """Lock `file`: a path, created with `mode` less the umask if it is missing, or an open descriptor (for example
        of a folder), which this lock closes. Raises BlockingIOError when `blocking` is false and another descriptor
        holds the lock, OSError when the file cannot be opened; nothing stays open then."""
        if isinstance(file, Path):
            file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            fcntl.flock(file, fcntl.LOCK_EX if blocking else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(file)
            raise
        self._descriptor = file

    def release(self) -> None:
        """Close the descriptor, which releases the lock; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
