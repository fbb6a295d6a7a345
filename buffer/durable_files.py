"""Files that are complete and durable, or not there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def fsync(path: Path) -> None:
    """Of a file or a directory. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write the file, or put it in the place of an older one: whoever opens it finds one of the two, whole, also after
    a power cut. Raises OSError."""
    staged = path.with_name(path.name + ".partial")
    staged.write_bytes(data)
    fsync(staged)
    staged.replace(path)
    fsync(path.parent)
