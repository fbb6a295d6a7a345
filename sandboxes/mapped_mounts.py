# ruff: noqa: PTH123
# (pathlib stays out of processes that hold the standard library only)
"""Bind mounts that show files under other owners: an image unpacked once serves sandboxes with id ranges of their own.

Invariants: the files themselves are not changed; a mount is attached only once it is mapped, so nobody sees it without;
the user namespace that carries a map has no process left in it.

Linux: open_tree(2), mount_setattr(2) with MOUNT_ATTR_IDMAP, move_mount(2); 5.12 for ext4, 5.19 as a lower layer of
overlayfs, 6.3 for tmpfs.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

from headrace.sandboxes import syscalls

_SYS_OPEN_TREE: Final = 428
_SYS_MOVE_MOUNT: Final = 429
_SYS_MOUNT_SETATTR: Final = 442
_OPEN_TREE_CLONE: Final = 1
_AT_EMPTY_PATH: Final = 0x1000
_AT_FDCWD: Final = -100
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_MOUNT_ATTR_IDMAP: Final = 0x00100000

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def open_map(stored_id: int, shown_id: int, count: int) -> int:
    """A user namespace, as a descriptor, that shows `stored_id` as `shown_id`, and so on for `count` ids."""
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(ready_write, b".")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(ready_write)
        if not os.read(ready_read, 1):
            raise OSError("no user namespace for an id map")
        for name in ("uid_map", "gid_map"):
            with open(f"/proc/{pid}/{name}", "w", encoding="ascii") as file:
                file.write(f"{stored_id} {shown_id} {count}\n")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def mount_mapped(source: str, target: str, id_map: int) -> None:
    """Show `source` at `target` through a map of `open_map`. Raises OSError where the file system cannot."""
    tree = _checked(
        _libc.syscall(_SYS_OPEN_TREE, _AT_FDCWD, os.fsencode(source), _OPEN_TREE_CLONE | os.O_CLOEXEC),
        f"open_tree {source}",
    )
    try:
        attributes = _MountAttributes(attr_set=_MOUNT_ATTR_IDMAP, userns_fd=id_map)
        _checked(
            _libc.syscall(
                _SYS_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), ctypes.sizeof(attributes)
            ),
            f"id map of {source}",
        )
        _checked(
            _libc.syscall(_SYS_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH),
            f"mount on {target}",
        )
    finally:
        os.close(tree)
