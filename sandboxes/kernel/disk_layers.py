# ruff: noqa: PTH106
# (pathlib stays out of the launcher: what is not imported is not copied at a fork)
"""File layers on the host's disk: each an ext4 file system in a file without a name, on a loop device.

Invariants:
- The file has no name from the beginning and the device clears itself: whatever dies, nothing stays behind.
- Its size is a hard cap; only what was written takes space.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from contextlib import suppress
from typing import Final

from headrace.sandboxes.kernel import syscalls

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
    """Of an empty file system, below the folder of the layers."""
    return f"{TEMPLATES}/{size_bytes}.ext4"


def mount_disk_layer(folder: int, size_bytes: int, target: str, owner_id: int, scratch: str) -> None:
    """Mount a new layer at `target` in this mount namespace. `scratch` is a folder where devices may be made.

    Raises OSError.
    """
    file = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        _copy_template(folder, size_bytes, file)
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


def _copy_template(folder: int, size_bytes: int, file: int) -> None:
    template = os.open(template_name(size_bytes), os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.ftruncate(file, size_bytes)
        position = 0
        while (start := _next_data(template, position)) is not None:
            position = os.lseek(template, start, os.SEEK_HOLE)
            while start < position:
                start += os.pwrite(file, os.pread(template, min(_COPY_BYTES, position - start), start), start)
    finally:
        os.close(template)


def _next_data(file: int, position: int) -> int | None:
    try:
        return os.lseek(file, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise


def _attach(file: int, scratch: str) -> tuple[int, str]:
    """A loop device over the file, opened, and its node. Others look for a free one at the same time."""
    # Not the pid: every maker is process 1 of its own namespace.
    name = os.urandom(8).hex()
    control_path = f"{scratch}/control-{name}"
    os.mknod(control_path, 0o600 | stat.S_IFCHR, os.makedev(*_CONTROL_DEVICE))
    try:
        control = os.open(control_path, os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.unlink(control_path)  # noqa: PTH108
    try:
        for _ in range(_TRIES):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            path = f"{scratch}/loop-{name}"
            os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(_LOOP_MAJOR, number))
            if (device := _configure(path, file)) is not None:
                return device, path
            os.unlink(path)  # noqa: PTH108
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no loop device could be had")


def _configure(path: str, file: int) -> int | None:
    """Open the device and bind it to the file; None when somebody else was faster."""
    device = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    # struct loop_config: fd, block_size, struct loop_info64 (flags at byte 52 of 232), reserved.
    information = bytearray(232)
    struct.pack_into("=I", information, 52, _LO_FLAGS_AUTOCLEAR)
    try:
        fcntl.ioctl(device, _LOOP_CONFIGURE, struct.pack("=II", file, 4096) + bytes(information) + bytes(64))
    except OSError as error:
        os.close(device)
        if error.errno == errno.EBUSY:
            return None
        raise
    return device
