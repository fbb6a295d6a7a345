"""Lookup of paths in overlaid layers without mounting them.

Invariants: the kernel follows no symbolic link; each is read and resolved here, inside the merged tree. A whiteout or
an opaque folder hides lower layers, as in overlayfs.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from headrace.sandboxes.errors import ImageRefused

_MAX_LINKS: Final = 40
_SHELLS: Final = ("/bin/bash", "/usr/bin/bash")
# e_machine of elf(5)
_MACHINES: Final = {"x86_64": 62, "aarch64": 183}
_OCI_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}


def find(layers: Sequence[Path], path: str) -> Path | None:
    """Return the host's path of the file or folder `path` of the merged tree, or None if it does not exist."""
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
    """Return the topmost entry called `name` and, if it is a folder, all the folders that are merged there."""
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
        with suppress(OSError):
            if os.getxattr(path, "trusted.overlay.opaque", follow_symlinks=False) == b"y":
                break
    return (merged[0] if merged else None), merged


def check_usable(layers: Sequence[Path]) -> None:
    """Check that the image has a bash built for this machine, at a path where commands look for it. Raises
    ImageRefused."""
    for path in _SHELLS:
        bash = find(layers, path)
        if bash is not None and bash.is_file() and bash.stat().st_mode & 0o111:
            break
    else:
        raise ImageRefused(f"the image has no bash: commands need {' or '.join(_SHELLS)}")
    machine = os.uname().machine
    with bash.open("rb") as file:
        header = file.read(20)
    if header[:4] != b"\x7fELF" or len(header) < 20:
        raise ImageRefused(f"{path} of the image is not an ELF program")
    number = struct.unpack_from("<H", header, 18)[0]
    if number != _MACHINES.get(machine, number):
        raise ImageRefused(
            f"image for another kind of machine: {path} has ELF machine {number}, this host is {machine}"
        )


def oci_architecture() -> str:
    """Return this machine's architecture by its OCI name (GOARCH)."""
    machine = os.uname().machine
    return _OCI_ARCHITECTURES.get(machine, machine)
