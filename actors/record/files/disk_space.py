"""Disks of a run: which of its folders has no space left, and the error that says so.

Invariant: whatever a full disk made fail, the run ends with one `DiskFull`, which names the folder and what waits for
space. No process of the run is started before there is some.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from headrace.actors.errors import DiskFull
from headrace.actors.record.files.run_directory import RunDirectory

WAITING: Final = {
    "state": "the ledger waits",
    "trajectories": "results of rollouts wait",
    "sandboxes": "boots wait",
    "storage": "checkpoints and weights wait",
    "logs": "log lines are lost",
}
"""What happens while the disk of a folder is full. Full logs end nothing."""


def full_folders(directory: RunDirectory, min_free_bytes: int, *, shared: bool = True) -> dict[str, Path]:
    """Return the folders whose disk has less than `min_free_bytes` left, by name; of those on one disk only the first.
    Without `shared` the storage is left out, which may not answer."""
    path = directory.path
    folders = (path, path / "trajectories", directory.sandboxes, directory.storage if shared else path, directory.logs)
    full: dict[int, tuple[str, Path]] = {}
    for name, folder in zip(WAITING, folders, strict=True):
        with suppress(OSError):
            if shutil.disk_usage(folder).free < min_free_bytes:
                full.setdefault(folder.stat().st_dev, (name, folder))
    return dict(full.values())


def lacks_space(directory: RunDirectory, min_free_bytes: int) -> str:
    """Return `missing_space` for all folders of a run. Blocks while the storage hangs."""
    return missing_space(full_folders(directory, min_free_bytes), min_free_bytes)


def missing_space(full: Mapping[str, Path], min_free_bytes: int) -> str:
    """Return which folder that a run cannot do without is on a full disk, and what waits for space; empty if none is.
    `full` are the `full_folders`."""
    for name, folder in full.items():
        if name != "logs":
            return (
                f"the disk of {folder} ({name}) has less than service.min_free_bytes ({min_free_bytes >> 20} MiB) "
                f"left, and {WAITING[name]}: free some space, then resume the run"
            )
    return ""


def named(error: Exception, directory: RunDirectory, min_free_bytes: int) -> Exception:
    """Return the DiskFull for an error that a full disk caused, or the error itself. Blocks while the storage hangs."""
    full = lacks_space(directory, min_free_bytes)
    if not full and isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        # More was to be written than there was left, a quota is used up, or there is space again.
        path = error.filename or directory.storage
        full = f"{path} cannot be written ({error.strerror}): free some space, then resume the run"
    return DiskFull(full) if full else error


@contextmanager
def needing_space(directory: RunDirectory, min_free_bytes: int) -> Iterator[None]:
    """Raise DiskFull if a disk is full when the block begins, or in place of an error that a full one caused."""
    if full := lacks_space(directory, min_free_bytes):
        raise DiskFull(full)
    try:
        yield
    except Exception as error:
        if (cause := named(error, directory, min_free_bytes)) is error:
            raise
        raise cause from error
