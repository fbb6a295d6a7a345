"""What a path leads to in overlaid layers, found by looking at the layers one by one: nothing is mounted.

Invariants: no symbolic link is followed by the kernel, each is read and resolved here, inside the merged tree; a
whiteout or an opaque folder hides what lies below it, as overlayfs would.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import ImageRefused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MAX_LINKS: Final = 40
_SHELLS: Final = ("/bin/bash", "/usr/bin/bash")
# e_machine of elf(5)
_MACHINES: Final = {"x86_64": 62, "aarch64": 183}
_OCI_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def find(layers: Sequence[Path], path: str) -> Path | None:
    """Where the file or folder `path` of the merged tree lies on the host; None when it is not there."""
    waiting = [part for part in path.split("/") if part][::-1]
    folders: list[list[Path]] = [list(layers)]
    found: Path | None = layers[0]
    links = 0
    while waiting:
        part = waiting.pop()
        if part == "..":
            folders[1:] = folders[1:-1]
            continue
        if part == ".":
            continue
        found, below = _step(folders[-1], part)
        if found is not None and found.is_symlink():
            target, links = str(found.readlink()), links + 1
            if links > _MAX_LINKS:
                return None
            if target.startswith("/"):
                folders = folders[:1]
            waiting += [name for name in target.split("/") if name][::-1]
            found = folders[-1][0]
        elif below:
            folders.append(below)
        elif waiting or found is None:
            return None
    return found


def _step(folders: list[Path], name: str) -> tuple[Path | None, list[Path]]:
    """The topmost thing called `name`, and all folders that are merged there when it is one."""
    merged: list[Path] = []
    for folder in folders:
        path = folder / name
        try:
            mode = path.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            continue
        if not stat.S_ISDIR(mode):
            whiteout = stat.S_ISCHR(mode)
            return (merged[0], merged) if merged else (None if whiteout else path, [])
        merged.append(path)
        if _is_opaque(path):
            break
    return (merged[0] if merged else None), merged


def _is_opaque(folder: Path) -> bool:
    try:
        return os.getxattr(folder, "trusted.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def check_usable(layers: Sequence[Path]) -> None:
    """Raises ImageRefused unless a bash for this machine is where commands look for it."""
    for path in _SHELLS:
        bash = find(layers, path)
        if bash is not None and bash.is_file() and bash.stat().st_mode & 0o111:
            _check_machine(bash, path)
            return
    raise ImageRefused(f"image without bash: commands need {' or '.join(_SHELLS)}")


def _check_machine(bash: Path, path: str) -> None:
    machine = os.uname().machine
    with bash.open("rb") as file:
        header = file.read(20)
    if header[:4] != b"\x7fELF" or len(header) < 20:
        raise ImageRefused(f"{path} of the image is no program of this kind of machine")
    found = struct.unpack_from("<H", header, 18)[0]
    if found != _MACHINES.get(machine, found):
        raise ImageRefused(f"image for another kind of machine: {path} is ELF machine {found}, this host is {machine}")


def oci_architecture() -> str:
    """This machine in the words of OCI (GOARCH)."""
    machine = os.uname().machine
    return _OCI_ARCHITECTURES.get(machine, machine)
