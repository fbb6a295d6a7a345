# ruff: noqa: PTH106
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""File layers on the host's disk, each an ext4 file system in an unnamed file, attached to a loop device.

Invariants:
- The file never has a name and the device detaches itself, so nothing is left behind when a process dies.
- The size of the file system is a hard limit; only written data takes space.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress
from typing import Final

from headrace.sandboxes.linux import syscalls

# include/uapi/linux/loop.h, Documentation/admin-guide/devices.txt
_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LO_FLAGS_AUTOCLEAR: Final = 4
_CONTROL_DEVICE: Final = (10, 237)
_LOOP_MAJOR: Final = 7
_TRIES: Final = 64
_COPY_BYTES: Final = 1 << 20
TEMPLATES: Final = "templates"


def template_name(size_bytes: int) -> str:
    """Return the path of an empty file system, relative to the layers folder."""
    return f"{TEMPLATES}/{size_bytes}.ext4"


def mount_disk_layer(folder: int, size_bytes: int, target: str, owner_id: int, scratch: str) -> None:
    """Mount a new layer at `target` in this mount namespace; devices are made in `scratch`. Raises OSError."""
    file = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        template = os.open(template_name(size_bytes), os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.ftruncate(file, size_bytes)
            _copy_data(template, file)
        finally:
            os.close(template)
        device, path = _attach(file, scratch)
    finally:
        os.close(file)
    try:
        syscalls.mount(path, target, "ext4", syscalls.MS_NOSUID | syscalls.MS_NODEV, "noinit_itable")
    finally:
        os.close(device)
        os.unlink(path)  # noqa: PTH108
    with suppress(OSError):
        os.rmdir(f"{target}/lost+found")
    os.chown(target, owner_id, owner_id)


def _copy_data(source: int, target: int) -> None:
    """Copy a sparse file without its holes."""
    position = 0
    while True:
        try:
            start = os.lseek(source, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        position = os.lseek(source, start, os.SEEK_HOLE)
        while start < position:
            start += os.pwrite(target, os.pread(source, min(_COPY_BYTES, position - start), start), start)


def _attach(file: int, scratch: str) -> tuple[int, str]:
    """Bind a free loop device to the file and return the open device and its node."""
    # The pid would not be unique: every caller is process 1 of its own namespace.
    name = os.urandom(8).hex()
    control_path = f"{scratch}/control-{name}"
    os.mknod(control_path, 0o600 | stat.S_IFCHR, os.makedev(*_CONTROL_DEVICE))
    try:
        control = os.open(control_path, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.unlink(control_path)  # noqa: PTH108
    # struct loop_config: fd, block_size, struct loop_info64 (flags at byte 52 of 232), reserved.
    information = bytearray(232)
    struct.pack_into("=I", information, 52, _LO_FLAGS_AUTOCLEAR)
    config = struct.pack("=II", file, 4096) + bytes(information) + bytes(64)
    path = f"{scratch}/loop-{name}"
    try:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
            device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(device, _LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(device)
                # Another process has taken the device since it was found free.
                if error.errno != errno.EBUSY:
                    raise
                os.unlink(path)  # noqa: PTH108
            else:
                return device, path
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, f"no free loop device after {_TRIES} attempts")
