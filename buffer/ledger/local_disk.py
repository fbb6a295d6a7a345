"""Checks that a directory is on a local disk with free space.

SQLite's WAL needs shared memory and locks that network file systems do not provide.

See https://www.sqlite.org/wal.html, "all processes using a database must be on the same host".
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from headrace.buffer.errors import LedgerDiskFull, LedgerRefused

NETWORK_MAGIC = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x65735546: "FUSE",
    0x00C36400: "Ceph",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x5346414F: "AFS",
    0x19830326: "BeeGFS",
}
"""`f_type` of statfs(2) by file system; FUSE is refused because most of its users are network file systems."""

MIN_FREE_BYTES = 8 << 20
"""Free space needed for a few transactions with trajectories."""


def filesystem_magic(directory: Path) -> int:
    """Return the `f_type` of `directory`'s file system; 0 on systems other than Linux. Raises OSError."""
    if sys.platform != "linux":
        return 0
    buffer = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(directory), buffer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    return ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF


def refuse_network(directory: Path, magic: int) -> None:
    """Raise LedgerRefused when `magic` is that of a network file system."""
    if name := NETWORK_MAGIC.get(magic):
        raise LedgerRefused(
            f"{directory} is on {name}, where a ledger is not safe: choose a run directory on a local disk"
        )


def refuse_full(directory: Path, free_bytes: int) -> None:
    """Raise LedgerDiskFull when too few bytes are free for the next transactions."""
    if free_bytes < MIN_FREE_BYTES:
        raise LedgerDiskFull(
            f"the disk of {directory} is full ({free_bytes >> 20} MiB free): free some space, then resume the run"
        )
