"""A user's private folders for sockets, secrets and locks, often below a folder that all users share.

Invariants:
- A new folder, and every new parent, is private whatever the umask.
- A folder of another user is never used, not even by root: its owner could replace its contents.
- Below the folder for temporary files each user has separate folders, named by user id. If another user has taken the
  name, the next free name is used; every process of this user finds the same one.
- The mode of a folder that has one of our names is repaired. The
  mode of a folder that the user chose is not changed, because it could be a home folder or /tmp.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from headrace.sandboxes.errors import FolderRefused

PRIVATE: Final = 0o700
_NAMES: Final = 9
"""Number of names tried for this user's folder before an error reports that other users have taken them."""
_WHOLE_ID_RANGE: Final = "4294967295"


def temporary_folder() -> Path:
    """Return TMPDIR, or the system's folder for temporary files when it is unset. Python falls back silently if TMPDIR
    is unusable, but Ray does not, so the two would use different folders. Raises FolderRefused."""
    chosen = os.environ.get("TMPDIR")
    named, fix = (
        f"TMPDIR {chosen}" if chosen else "the folder for temporary files",
        "set TMPDIR to a folder of your own",
    )
    try:
        folder = Path(chosen or tempfile.gettempdir()).absolute()
        owner = folder.stat().st_uid
        # The mode is not enough: root may write anywhere, except to a full disk or a read-only mount.
        Path(tempfile.mkdtemp(prefix="headrace-", dir=folder)).rmdir()
    except OSError as error:
        raise FolderRefused(f"{named} cannot be written: {error.strerror}; {fix}") from error
    # In a rootless container the owner of /tmp may be a user that this user namespace does not map.
    overflow = Path("/proc/sys/kernel/overflowuid").read_text().strip()
    is_mapped = str(owner) != overflow or Path("/proc/self/uid_map").read_text().split()[-1:] == [_WHOLE_ID_RANGE]
    if owner not in (0, os.geteuid()) and is_mapped:
        raise FolderRefused(f"{named} belongs to another user (id {owner}), who can replace everything in it: {fix}")
    return folder


def user_folder(purpose: str) -> Path:
    """Make and return this user's `headrace-<purpose>-<user id>` below the folder for temporary files. Raises
    FolderRefused if no name for it is left."""
    name = f"headrace-{purpose}-{os.geteuid()}"
    first = temporary_folder() / name
    candidates = [first, *(first.with_name(f"{name}-{number}") for number in range(2, _NAMES + 1))]
    # An existing folder comes first, because other processes of this user are using it.
    for folder in candidates:
        if os.path.lexists(folder) and _repair_own(folder):
            return folder
    for folder in candidates:
        if not os.path.lexists(folder):
            make_private(folder)
            return folder
    raise FolderRefused(f"{first} belongs to another user: remove it, or set TMPDIR to a folder of your own")


def _repair_own(folder: Path) -> bool:
    """Narrow the mode of a folder that has one of our names. Returns False if it, or an entry in it, belongs to another
    user."""
    try:
        with _open_folder(folder, follow=False) as descriptor:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid():
                return False
            if stat.S_IMODE(status.st_mode) != PRIVATE:
                _path_of(descriptor).chmod(PRIVATE)
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                with os.scandir(_path_of(descriptor)) as entries:
                    return all(entry.stat(follow_symlinks=False).st_uid == os.geteuid() for entry in entries)
    except NotADirectoryError:
        return False
    except OSError as error:
        raise FolderRefused(f"{folder}: {error.strerror}; remove it, or set TMPDIR to another folder") from error
    return True


def make_private(folder: Path) -> None:
    """Make a private folder with its parents, or check that the existing one is private. Raises FolderRefused."""
    try:
        make_missing(folder)
        with _open_folder(folder) as descriptor:
            status = os.fstat(descriptor)
    except OSError as error:
        raise FolderRefused(f"{folder} cannot be made: {error.strerror}; choose another folder") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & ~PRIVATE:
        raise FolderRefused(
            f"{folder} must belong to this user with mode {PRIVATE:o} (it belongs to user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}): chmod {PRIVATE:o} it, remove it, or choose another"
        )


def make_missing(folder: Path) -> None:
    """Make a private folder and its missing parents; existing ones are not changed. Raises OSError."""
    for part in reversed((folder, *folder.parents)):
        if part.is_dir():
            continue
        try:
            part.mkdir(mode=PRIVATE)
        except FileExistsError:
            # Another process was faster, unless this is not a folder.
            if not part.is_dir():
                raise
        else:
            # The umask may have removed bits from the mode.
            part.chmod(PRIVATE)


def new_private(parent: Path, prefix: str) -> Path:
    """Make and return a private folder `<prefix><random>`. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    folder.chmod(PRIVATE)
    return folder


@contextmanager
def _open_folder(folder: Path, *, follow: bool = True) -> Iterator[int]:
    """Open the folder itself, even if its name is replaced meanwhile; this needs no read permission."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(folder, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _path_of(descriptor: int) -> Path:
    """Return a path to the open folder, because fchmod(2) does not work on a descriptor opened with O_PATH."""
    return Path(f"/proc/self/fd/{descriptor}")
