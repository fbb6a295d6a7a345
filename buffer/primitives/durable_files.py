"""Atomic writes of files and folders that must survive a crash.

Invariants:
- Data reaches the disk before the rename that makes it visible, and the rename before the call returns. After a power
  cut the file has the old contents or the new ones, and is never empty.
- The staged name is the final one with the suffix `.partial`. A crash may leave a staged file behind; the next write
  overwrites it.
- A file that `create_file` makes is complete as soon as its name exists. The staged name (`NAME.TOKEN.partial`) is
  private to the call and is removed when it fails; only a crash leaves one behind.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

PARTIAL = ".partial"
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of link(2) on file systems without hard links: FAT, some of FUSE and SMB."""


def fsync(path: Path) -> None:
    """Flush a file or a directory to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write or replace a file atomically: readers see the complete old file or the complete new one,
    even after a power cut.
    `mode` is that of the new file, less the umask. Raises OSError."""
    replace_from(path, (data,), mode=mode)


def replace_from(path: Path, pieces: Iterable[bytes], *, mode: int = 0o666) -> None:
    """Write or replace a file like `replace_file`, piece by piece. Raises OSError, and what `pieces` raises."""
    staged = path.with_name(path.name + PARTIAL)
    # A file left over by a crash may have wider permissions.
    staged.unlink(missing_ok=True)
    _write(staged, pieces, mode)
    staged.replace(path)
    fsync(path.parent)


def create_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Create a file with its content, or fail without a trace: a full disk leaves no empty file under the name. Raises
    FileExistsError if it exists, OSError."""
    staged = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        _write(staged, (data,), mode)
        try:
            os.link(staged, path)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
            # Empty until the rename, which needs no space. A crash in between leaves it empty.
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode))
            staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)
    fsync(path.parent)


def _write(path: Path, pieces: Iterable[bytes], mode: int) -> None:
    """Write a file and flush it to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.writelines(pieces)
        file.flush()
        os.fsync(descriptor)


def append_line(path: Path, line: bytes) -> int:
    """Append a line in a single write, and return the size of the file. A line that a full disk has torn before is
    ended first: it must not spoil this one. Raises OSError, also if only a part of the line could be written."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def write_private(path: Path, data: bytes) -> None:
    """Write or replace a file that only its owner may read. Raises OSError."""
    replace_file(path, data, mode=0o600)


def publish_folder(staged: Path, final: Path) -> None:
    """Make a staged folder durable with its contents, then visible under its final name, which must not exist. Raises
    OSError."""
    for directory, _, files in os.walk(staged):
        for name in files:
            fsync(Path(directory, name))
        fsync(Path(directory))
    staged.rename(final)
    fsync(final.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Link a file under a second name, or copy it if the file system cannot. Raises OSError."""
    try:
        # The file itself and not a symbolic link to it, which would break when the source is removed.
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
