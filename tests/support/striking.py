"""Ends this process, or its disk, at one exact moment: the n-th statement, write or file operation of its ledger.

Invariants:
- Nothing of headrace is replaced. Statements are seen through SQLite's trace, its writes through the system call table
  of its VFS, everything else (open, rename, mkdir, unlink) through the interpreter's audit hook.
- What is not struck happens as always; the process that is struck runs no line more.
"""

from __future__ import annotations

import _sqlite3
import ctypes
import errno
import os
import signal
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Moment(StrEnum):
    """Where a blow falls."""

    STATEMENT = "statement"
    """Killed before the n-th SQL statement: between two rows of a transaction, before its COMMIT."""
    TORN_WRITE = "torn-write"
    """Killed in the n-th write of SQLite, when half of its bytes are there."""
    FILE = "file"
    """Killed before the n-th operation on a file below the run: in the midst of a backup, a rotation."""
    CHECKPOINT = "checkpoint"
    """The same, below the run's checkpoints alone."""
    DISK_FULL = "disk-full"
    """From the n-th write of SQLite on the disk is full."""
    COUNT = "count"
    """No blow; everything is counted."""


@dataclass(slots=True)
class Seen:
    """How many there were so far."""

    statements: int = 0
    writes: int = 0
    files: int = 0
    checkpoints: int = 0


FILE_EVENTS: Final = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"})
SEEN: Final = Seen()
_KEPT: Final[list[Any]] = []
"""Callbacks that C code knows: they must not be collected."""


def arm(moment: Moment, number: int, folder: str) -> None:
    """From here on the process meets its fate at the `number`-th such moment, counted from 1; `folder` is the run's."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in FILE_EVENTS or not str(arguments[0]).startswith(folder):
            return
        SEEN.files += 1
        SEEN.checkpoints += str(arguments[0]).startswith(f"{folder}/checkpoints")
        if (moment, number) in ((Moment.FILE, SEEN.files), (Moment.CHECKPOINT, SEEN.checkpoints)):
            _die()

    sys.addaudithook(hook)
    # The SQLite that Python is linked with.
    library = ctypes.CDLL(_sqlite3.__file__)
    library.sqlite3_initialize()
    _trace_statements(library, moment, number)
    _replace_writes(library, moment, number)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_TRACED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_OPENED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_TRACE_STATEMENTS = 1


def _trace_statements(library: ctypes.CDLL, moment: Moment, number: int) -> None:
    """In every connection that is opened from here on."""

    def count(*_: Any) -> int:
        SEEN.statements += 1
        if moment is Moment.STATEMENT and SEEN.statements == number:
            _die()
        return 0

    traced = _TRACED(count)

    def open_traced(database: int, *_: Any) -> int:
        library.sqlite3_trace_v2(ctypes.c_void_p(database), _TRACE_STATEMENTS, traced, None)
        return 0

    opened = _OPENED(open_traced)
    _KEPT.extend((traced, opened))
    library.sqlite3_auto_extension(opened)


class _Vfs(ctypes.Structure):
    """`sqlite3_vfs` of version 3, see https://www.sqlite.org/c3ref/vfs.html."""

    _fields_ = (
        ("iVersion", ctypes.c_int),
        ("szOsFile", ctypes.c_int),
        ("mxPathname", ctypes.c_int),
        ("pNext", ctypes.c_void_p),
        ("zName", ctypes.c_char_p),
        ("pAppData", ctypes.c_void_p),
        ("methods", ctypes.c_void_p * 13),
        ("xSetSystemCall", ctypes.c_void_p),
        ("xGetSystemCall", ctypes.c_void_p),
    )


_GET = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_WRITE_AT = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)


def _replace_writes(library: ctypes.CDLL, moment: Moment, number: int) -> None:
    library.sqlite3_vfs_find.restype = ctypes.c_void_p
    address = library.sqlite3_vfs_find(None)
    vfs = _Vfs.from_address(address)
    for name in (b"pwrite", b"pwrite64"):
        # Where SQLite was built without this call there is nothing to replace.
        if original := _GET(vfs.xGetSystemCall)(address, name):
            write = _counting_write(moment, number, _WRITE_AT(original))
            _KEPT.append(write)
            assert _SET(vfs.xSetSystemCall)(address, name, ctypes.cast(write, ctypes.c_void_p)) == 0


def _counting_write(moment: Moment, number: int, original: Any) -> Any:
    def write(descriptor: int, data: int, size: int, offset: int) -> int:
        SEEN.writes += 1
        if moment is Moment.TORN_WRITE and SEEN.writes == number:
            original(descriptor, data, size // 2, offset)
            _die()
        if moment is Moment.DISK_FULL and SEEN.writes >= number:
            ctypes.set_errno(errno.ENOSPC)
            return -1
        written: int = original(descriptor, data, size, offset)
        return written

    return _WRITE_AT(write)
