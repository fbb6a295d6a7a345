"""Private folders: the ones that hold sockets, secrets and locks of one user, often below a folder of all users.

Invariants:
- A folder made here has exactly the mode asked for, and so has every parent that was missing, whatever the umask.
- A folder of another user is never used, also not by root: its owner could replace whatever lies in it.
- Under the folder for temporary files each user has folders of their own, named by user id. Where another user has
  taken the name, the next free name is used; every process of this user finds the same one.
- The mode of a folder with our own name is repaired (older versions made some with the default mode). The mode of a
  folder that the user chose is theirs to repair: it could be a home folder, or /tmp.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import FolderRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

PRIVATE: Final = 0o700
_NAMES: Final = 9
"""Names tried for a folder of this user before another user's folders are reported."""
_WHOLE_ID_RANGE: Final = "4294967295"


def temporary_folder() -> Path:
    """Return TMPDIR, or the system's folder for temporary files when it is unset.

    Python falls back silently when TMPDIR is unusable, and Ray does not: the two would use different folders. Raises
    FolderRefused.
    """
    chosen = os.environ.get("TMPDIR")
    named, fix = (
        f"TMPDIR {chosen}" if chosen else "the folder for temporary files",
        "set TMPDIR to a folder of your own",
    )
    try:
        folder = Path(chosen or tempfile.gettempdir()).absolute()
        owner = folder.stat().st_uid
        # The mode does not tell: root may write anywhere, but not to a full disk or one that is mounted read-only.
        Path(tempfile.mkdtemp(prefix="headrace-", dir=folder)).rmdir()
    except OSError as error:
        raise FolderRefused(f"{named} cannot be written: {error.strerror}; {fix}") from error
    if owner not in (0, os.geteuid()) and not _is_unmapped(owner):
        raise FolderRefused(
            f"{named} belongs to another user (id {owner}), who can replace everything that lies there: {fix}"
        )
    return folder


def _is_unmapped(user: int) -> bool:
    """Whether an owner is one that this user namespace has no name for, as the owner of /tmp in rootless containers."""
    overflow = Path("/proc/sys/kernel/overflowuid").read_text().strip()
    return str(user) == overflow and Path("/proc/self/uid_map").read_text().split()[-1:] != [_WHOLE_ID_RANGE]


def user_folder(purpose: str, mode: int = PRIVATE) -> Path:
    """Make and return this user's `headrace-<purpose>-<user id>` below the folder for temporary files.

    Raises FolderRefused when no name for it is left.
    """
    name = f"headrace-{purpose}-{os.geteuid()}"
    first = temporary_folder() / name
    candidates = [first, *(first.with_name(f"{name}-{number}") for number in range(2, _NAMES + 1))]
    # One that is there already is where the other processes of this user meet.
    for folder in candidates:
        if os.path.lexists(folder) and _is_made_ours(folder, mode):
            return folder
    for folder in candidates:
        if not os.path.lexists(folder):
            make_private(folder, mode)
            return folder
    raise FolderRefused(f"{first} belongs to another user: remove it, or set TMPDIR to a folder of your own")


def _is_made_ours(folder: Path, mode: int) -> bool:
    """Narrow the mode of a folder with our own name; False if it is another user's, or holds anything of another's."""
    try:
        with _opened(folder, follow=False) as descriptor:
            status = os.fstat(descriptor)
            if status.st_uid != os.geteuid():
                return False
            if stat.S_IMODE(status.st_mode) != mode:
                _reopening(descriptor).chmod(mode)
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                with os.scandir(_reopening(descriptor)) as entries:
                    return all(entry.stat(follow_symlinks=False).st_uid == os.geteuid() for entry in entries)
    except NotADirectoryError:
        return False
    except OSError as error:
        raise FolderRefused(f"{folder}: {error.strerror}; remove it, or set TMPDIR to another folder") from error
    return True


def make_private(folder: Path, mode: int = PRIVATE) -> None:
    """Make a folder with its missing parents, or check that the one which is there is this user's with that mode.

    Raises FolderRefused.
    """
    try:
        make_missing(folder, mode)
        with _opened(folder) as descriptor:
            status = os.fstat(descriptor)
    except OSError as error:
        raise FolderRefused(f"{folder} cannot be made: {error.strerror}; choose another folder") from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & ~mode:
        raise FolderRefused(
            f"{folder} must belong to this user with mode {mode:o} (it belongs to user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}): chmod {mode:o} it, remove it, or choose another"
        )


def make_missing(folder: Path, mode: int = PRIVATE) -> None:
    """Make a folder and its missing parents; one that is there stays as it is. Raises OSError."""
    for part in reversed((folder, *folder.parents)):
        if not part.is_dir():
            _make(part, mode)


def _make(folder: Path, mode: int) -> None:
    try:
        folder.mkdir(mode=mode)
    except FileExistsError:
        # Another process was faster, unless this is no folder.
        if not folder.is_dir():
            raise
    else:
        # The umask took bits away.
        folder.chmod(mode)


def new_private(parent: Path, prefix: str) -> Path:
    """Make and return a private folder `<prefix><random>`. Raises OSError."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    folder.chmod(PRIVATE)
    return folder


@contextmanager
def _opened(folder: Path, *, follow: bool = True) -> Iterator[int]:
    """A descriptor of the folder itself, whatever takes its name meanwhile; it needs no right to read."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(folder, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _reopening(descriptor: int) -> Path:
    """A path that leads to the open folder: a descriptor that was opened by O_PATH takes no fchmod(2)."""
    return Path(f"/proc/self/fd/{descriptor}")
