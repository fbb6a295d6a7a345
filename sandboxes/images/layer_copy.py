"""Copy of the files that a frozen sandbox has written, as a layer of the image store.

Invariants:
- The source is hostile, but nothing changes it any more: its sandbox is frozen. Every folder is opened inside the
  source (openat2(2), no links followed), and every entry relative to its folder.
- Whiteouts (0/0 devices) and opaque folders are preserved, so that the layer hides what the sandbox has deleted. Other
  devices, FIFOs and sockets are dropped, and so are `security.*`, other `trusted.*` and ACL attributes.
- Ids become those of the image (the first id of the sandbox is 0); set-id bits are preserved, as in other images.
- The copy is refused beyond `UnpackLimits`. A layer that is not finished is removed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Collection
from contextlib import suppress
from typing import Final, NamedTuple

from headrace.sandboxes.errors import ImageRefused
from headrace.sandboxes.images.folders import StoreFolder
from headrace.sandboxes.images.layers import UnpackLimits, mark_opaque
from headrace.sandboxes.images.streams import BUFFER_BYTES
from headrace.sandboxes.linux import syscalls

_ENTRY_BYTES: Final = 4096
_PATH_ERRORS: Final = (errno.ENAMETOOLONG, errno.ELOOP)
_IDS: Final = 1 << 16
_NOBODY: Final = 65534
_INSIDE: Final = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_SYMLINKS | syscalls.RESOLVE_NO_MAGICLINKS
_OPEN: Final = os.O_RDONLY | os.O_CLOEXEC
_OPAQUE: Final = "trusted.overlay.opaque"
_REDIRECT: Final = "trusted.overlay.redirect"
"""Set by the kernel when a folder of a lower layer was renamed; no process of a sandbox can set it."""
_KEPT_XATTRS: Final = "user."
_DROPPED_XATTRS: Final = "user.overlay."


class OwnLayer(NamedTuple):
    """Detached mount of a frozen sandbox's files; `base_id` is the first id of its range. The holder closes it."""

    descriptor: int
    base_id: int


class CopiedLayer(NamedTuple):
    """A layer in the store; `entries` is 0 for a sandbox that has written nothing, which has no layer."""

    digest: str
    bytes: int
    entries: int


def copy_layer(source: OwnLayer, store: StoreFolder, limits: UnpackLimits, skip: Collection[str] = ()) -> CopiedLayer:
    """Copy a sandbox's files into the store, except the paths in `skip` (relative to the root). Takes ownership of
    `source`. Raises ImageRefused, OSError."""
    try:
        with store.new_layer() as folder:
            target = os.open(folder / "tree", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                copy = _Copy(source, target, limits, frozenset(skip))
                copy.run()
            finally:
                os.close(target)
            if copy.entries:
                digest = copy.hash.hexdigest()
                store.publish(folder, digest, copy.bytes)
                return CopiedLayer(digest, copy.bytes, copy.entries)
        return CopiedLayer("", 0, 0)
    finally:
        os.close(source.descriptor)


class _Copy:
    """One copy. The hash covers everything that the layer contains."""

    def __init__(self, source: OwnLayer, target: int, limits: UnpackLimits, skip: frozenset[str]) -> None:
        self._source = source.descriptor
        self._base_id = source.base_id
        self._target = target
        self._limits = limits
        self._skip = skip
        self._links: dict[int, str] = {}
        """Path of the first entry of each inode that has several names."""
        self._times: list[tuple[str, int]] = []
        self.hash = hashlib.sha256(b"layer of a sandbox\0")
        self.bytes = 0
        self.entries = 0

    def run(self) -> None:
        waiting = ["."]
        while waiting:
            path = waiting.pop()
            try:
                waiting += self.copy_folder(path)
            except OSError as error:
                if error.errno not in _PATH_ERRORS:
                    raise
                raise ImageRefused(f"the path {path[:200]!r} in the sandbox is too deep: {error.strerror}") from error
        # Last, because every new entry changes the time of its folder.
        for path, time_ns in reversed(self._times):
            descriptor = syscalls.open_resolved(self._target, path, _OPEN | os.O_DIRECTORY, _INSIDE)
            os.utime(descriptor, ns=(time_ns, time_ns))
            os.close(descriptor)

    def copy_folder(self, path: str) -> list[str]:
        """Copy the entries of a folder that exists on both sides; return the folders below it."""
        source = syscalls.open_resolved(self._source, path, _OPEN | os.O_DIRECTORY, _INSIDE)
        try:
            target = syscalls.open_resolved(self._target, path, _OPEN | os.O_DIRECTORY, _INSIDE)
            try:
                status = os.fstat(source)
                self._describe(source, target, status, path)
                self._times.append((path, status.st_mtime_ns))
                folders = []
                for name in sorted(os.listdir(source)):  # noqa: PTH208 - a descriptor PTH208 - a descriptor:
                    below = name if path == "." else f"{path}/{name}"
                    if below in self._skip:
                        continue
                    if self.copy_entry(source, target, name, below):
                        folders.append(below)
                return folders
            finally:
                os.close(target)
        finally:
            os.close(source)

    def copy_entry(self, source: int, target: int, name: str, path: str) -> bool:
        """Copy one entry; return True for a folder, whose entries are still to be copied."""
        status = os.stat(name, dir_fd=source, follow_symlinks=False)
        mode = status.st_mode
        is_whiteout = stat.S_ISCHR(mode) and status.st_rdev == 0
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode) or is_whiteout):
            return False
        self._count(_ENTRY_BYTES + (status.st_size if stat.S_ISREG(mode) else 0))
        if not stat.S_ISDIR(mode) and not is_whiteout and status.st_nlink > 1:
            first = self._links.setdefault(status.st_ino, path)
            if first != path:
                os.link(first, name, src_dir_fd=self._target, dst_dir_fd=target, follow_symlinks=False)
                self._note("hard link", path, first)
                return False
        if is_whiteout:
            os.mknod(name, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=target)
            self._note("whiteout", path)
        elif stat.S_ISDIR(mode):
            os.mkdir(name, 0o700, dir_fd=target)
        elif stat.S_ISLNK(mode):
            link = os.readlink(name, dir_fd=source)
            os.symlink(link, name, dir_fd=target)
            owner = (self._id(status.st_uid), self._id(status.st_gid))
            os.chown(name, *owner, dir_fd=target, follow_symlinks=False)
            times = (status.st_mtime_ns, status.st_mtime_ns)
            os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)
            self._note("link", path, link, *owner, status.st_mtime_ns)
        else:
            self.copy_file(source, target, name, path, status)
        return stat.S_ISDIR(mode)

    def copy_file(self, source: int, target: int, name: str, path: str, status: os.stat_result) -> None:
        reading = os.open(name, _OPEN | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=source)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            writing = os.open(name, flags, 0o600, dir_fd=target)
            try:
                content = hashlib.sha256()
                while data := os.read(reading, BUFFER_BYTES):
                    content.update(data)
                    view = memoryview(data)
                    while view:
                        view = view[os.write(writing, view) :]
                self._describe(reading, writing, status, path)
                os.utime(writing, ns=(status.st_mtime_ns, status.st_mtime_ns))
                self._note("content", content.hexdigest())
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    def _describe(self, source: int, target: int, status: os.stat_result, path: str) -> None:
        """Give a file or folder its owner, mode and attributes."""
        owner, mode = (self._id(status.st_uid), self._id(status.st_gid)), stat.S_IMODE(status.st_mode)
        os.fchown(target, *owner)
        # Set after the owner, because a change of owner clears the set-id bits.
        os.fchmod(target, mode)
        self._note("entry", path, *owner, mode, status.st_mtime_ns, stat.S_IFMT(status.st_mode))
        for name in sorted(os.listxattr(source)):
            if name == _OPAQUE:
                if os.getxattr(source, name) == b"y":
                    mark_opaque(target)
                    self._note("opaque")
            elif name == _REDIRECT or (name.startswith(_KEPT_XATTRS) and not name.startswith(_DROPPED_XATTRS)):
                value = os.getxattr(source, name)
                self._count(len(value))
                with suppress(OSError):
                    os.setxattr(target, name, value)
                self._note("attribute", name, value.hex())

    def _count(self, size: int) -> None:
        self.entries += 1
        self.bytes += size
        if self.entries > self._limits.entries or self.bytes > self._limits.bytes:
            raise ImageRefused(
                f"the step wrote more than a layer may hold: {self._limits.bytes} bytes or {self._limits.entries} files"
            )

    def _id(self, number: int) -> int:
        inside = number - self._base_id
        return inside if 0 <= inside < _IDS else _NOBODY

    def _note(self, *parts: str | int) -> None:
        for part in parts:
            text = str(part).encode(errors="surrogateescape")
            self.hash.update(f"{len(text)}:".encode() + text)
