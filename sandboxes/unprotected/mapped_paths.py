"""Files of the subprocess provider: mapping of short paths in text, access to regular files, copies of frozen data.

Invariants: no path outside the mapped folders is opened; links, FIFOs and devices are refused without blocking; a
frozen path is refused when any part of it is a link.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from headrace.sandboxes.errors import FrozenPathRefused, SandboxFileError, SpecRefused


class PathMap:
    """Mapping between the short paths of a sandbox and real ones, by text replacement."""

    def __init__(self, tree: Path, names: tuple[str, ...]) -> None:
        self._tree = str(tree)
        self._names = names
        alternatives = "|".join(re.escape(name) for name in names)
        self._pattern = re.compile(rf"(?<![\w.}}/-])/(?=(?:{alternatives})(?![\w.-]))".encode())

    def to_real(self, data: bytes) -> bytes:
        return self._pattern.sub(lambda _: self._tree.encode() + b"/", data)

    def text_to_real(self, text: str) -> str:
        return self.to_real(text.encode()).decode()

    def to_short(self, data: bytes) -> bytes:
        return data.replace(self._tree.encode(), b"")

    def real_path(self, path: str) -> Path:
        """Return the real path. Raises SandboxFileError for one outside the mapped folders."""
        normal = os.path.normpath(path)
        if not path.startswith("/") or normal.split("/")[1] not in self._names:
            raise SandboxFileError(f"{path}: the subprocess provider has only /{', /'.join(self._names)}")
        return Path(self._tree + normal)


def open_regular(path: str, flags: int) -> int:
    """An opener that refuses links, FIFOs and devices without blocking."""
    wanted = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, wanted, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "not a regular file")
    return descriptor


def copy_frozen(source: Path, path: str, tree: Path, target: str) -> None:
    """Copy a frozen path. Links inside it are copied as links; the path itself must not lead through one."""
    parts = [part for part in target.split("/") if part]
    if not target.startswith("/") or not parts or {".", ".."} & set(parts):
        raise SpecRefused(f"mount target {target!r}: use an absolute path without dots")
    origin = source
    for part in (part for part in path.split("/") if part):
        origin = origin / part
        if part == ".." or origin.is_symlink():
            raise FrozenPathRefused(f"frozen path {path!r}: leads through a symbolic link")
    if not origin.exists():
        raise FrozenPathRefused(f"frozen path {path!r}: No such file or directory")
    destination = tree.joinpath(*parts)
    if destination.exists() and destination.is_dir() != origin.is_dir():
        raise FrozenPathRefused(f"frozen path {path!r}: a file where the target is a folder, or vice versa")
    if origin.is_dir():
        shutil.copytree(origin, destination, symlinks=True, dirs_exist_ok=True, ignore=_ignore_special)
    elif origin.is_file():
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(origin, destination, follow_symlinks=False)
    else:
        raise FrozenPathRefused(f"frozen path {path!r}: neither a folder nor a regular file")


def _ignore_special(folder: str, names: list[str]) -> list[str]:
    kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    return [name for name in names if not any(kind(os.lstat(f"{folder}/{name}").st_mode) for kind in kinds)]
