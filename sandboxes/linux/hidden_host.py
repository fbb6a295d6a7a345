# ruff: noqa: PTH102, PTH123, PTH208
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""What a sandbox cannot learn about its host from /proc: files of the kernel, host paths and devices in mount tables.

Invariants:
- Of the files in /proc that belong to no process, a sandbox sees only those in `_SHOWN`. The others are covered by
  empty ones: nothing there is a setting of the sandbox, and most describe the host's hardware and start.
- The covers belong to ids outside the sandbox, which owns none of its mounts: it can neither write nor remove them.
- A folder of the host is shown through an overlay, because the mount table names the device and the path behind a bind.
- What the sandbox shares with its host stays visible: processors with their times, memory, uptime, and the kernel's
  version and settings.
"""

from __future__ import annotations

import os
import stat
from typing import Final, NamedTuple

from headrace.sandboxes.linux import syscalls

_COVERS: Final = "/covers"
_SHOWN: Final = frozenset(
    (
        "cpuinfo",
        "filesystems",
        "meminfo",
        "mounts",
        "net",
        "self",
        "stat",
        "sys",
        "sysvipc",
        "thread-self",
        "uptime",
        "version",
        "vmstat",
    )
)
_COVERED_SETTINGS: Final = (
    *("sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/kernel/random/boot_id"),
    # Counters of the whole host, by which its sandboxes could tell what others do.
    *("sys/fs/aio-nr", "sys/fs/dentry-state", "sys/fs/file-nr", "sys/fs/inode-nr", "sys/fs/inode-state"),
    *("sys/fs/quota", "sys/kernel/pty/nr"),
)


class Cover(NamedTuple):
    """A file or folder below /proc, and what is mounted over it."""

    name: str
    source: str


def prepare_covers(base: str, proc: str = "/proc") -> tuple[Cover, ...]:
    """Make the covers below `base`, which becomes the launcher's root, and return the names to cover in `proc`. Loads
    read as zero, and the id of the boot is drawn anew."""
    os.mkdir(f"{base}{_COVERS}", 0o755)
    os.mkdir(f"{base}{_COVERS}/folder", 0o555)
    drawn = os.urandom(16).hex()
    boot_id = "-".join((drawn[:8], drawn[8:12], drawn[12:16], drawn[16:20], drawn[20:]))
    contents = {"file": "", "loadavg": "0.00 0.00 0.00 1/1 1\n", "boot_id": f"{boot_id}\n"}
    for name, text in contents.items():
        with open(f"{base}{_COVERS}/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    covers = []
    names = [name for name in os.listdir(proc) if not name.isdigit() and name not in _SHOWN]
    for name in (*sorted(names), *_COVERED_SETTINGS):
        try:
            mode = os.lstat(f"{proc}/{name}").st_mode
        except OSError:
            continue
        last = name.rpartition("/")[2]
        source = last if last in contents else "folder" if stat.S_ISDIR(mode) else "file"
        covers.append(Cover(name, f"{_COVERS}/{source}"))
    return tuple(covers)


def cover(proc: str, covers: tuple[Cover, ...]) -> None:
    """Mount the covers in a sandbox's /proc."""
    for name, source in covers:
        syscalls.mount(source, f"{proc}/{name}", flags=syscalls.MS_BIND)


def show_folder(source: str, target: str, flags: int, options: str = "") -> bool:
    """Mount the folder `source` (or several, as in `lowerdir`) at `target` through a read-only overlay. Returns False
    where the kernel refuses, as below two other overlays."""
    lower = f"lowerdir={source}:{_COVERS}/folder"
    try:
        syscalls.mount("overlay", target, "overlay", flags | syscalls.MS_RDONLY, f"{lower},{options}".rstrip(","))
    except OSError:
        return False
    return True
