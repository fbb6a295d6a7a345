"""Files and folders that are complete and durable, or not there: the one place where headrace writes a file that must
outlive a crash.

Invariants:
- Data reaches the disk before the rename that makes it visible, and the rename before the call returns. After a power
  cut the old contents are there or the new ones, never an empty file.
- A staged name is the final one with `.partial` behind it. It may be left over by a crash, and is overwritten.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

PARTIAL = ".partial"


def fsync(path: Path) -> None:
    """Of a file or a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write the file, or put it in the place of an older one: whoever opens it finds one of the two, whole, also after
    a power cut. `mode` is that of the new file, less the umask. Raises OSError."""
    staged = path.with_name(path.name + PARTIAL)
    # One that a crash left may have wider permissions.
    staged.unlink(missing_ok=True)
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
    staged.replace(path)
    fsync(path.parent)


def write_private(path: Path, data: bytes) -> None:
    """`replace_file` for what only its owner may read. Raises OSError."""
    replace_file(path, data, mode=0o600)


def publish_folder(staged: Path, final: Path) -> None:
    """Make a staged folder durable with all that is in it, then visible under its final name, which must not exist.
    Raises OSError."""
    for directory, _, files in os.walk(staged):
        for name in files:
            fsync(staged.joinpath(directory, name))
        fsync(staged.joinpath(directory))
    staged.rename(final)
    fsync(final.parent)
