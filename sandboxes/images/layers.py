"""Unpacking of one image layer: a hostile tar becomes a folder that overlayfs can use as a lower layer.

Invariants:
- Every parent folder is opened with openat2(2) inside the layer's own folder (RESOLVE_IN_ROOT): no name, link or
  earlier entry leads out of it. Names with `..` and absolute names are refused, and hard links may refer only to
  earlier entries.
- Only folders, regular files, symbolic and hard links are made. Device nodes and FIFOs in the archive are dropped.
- Ids, modes with their set-id bits, times, and `user.*` and ACL attributes are preserved. `security.*` and `trusted.*`
  are dropped, because the kernel or overlayfs would act on them.
- Whiteouts are converted to those of overlayfs (Documentation/filesystems/overlayfs.rst): a 0/0 character device, and
  `overlay.opaque` in both the `trusted.` and the `user.` namespace. They apply to lower layers only (OCI image-spec
  layer.md): entries of the same layer remain, in any order.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from headrace.sandboxes.errors import ImageRefused
from headrace.sandboxes.images.streams import ARCHIVE_ERRORS, BUFFER_BYTES, TarInput, members, split_name
from headrace.sandboxes.linux import syscalls

MAX_ENTRIES: Final = 1_000_000
_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
_WHITEOUT_INTERNAL: Final = ".wh..wh."
_XATTR_HEADER: Final = "SCHILY.xattr."
_ALLOWED_XATTRS: Final = ("user.", "system.posix_acl_")
_FORBIDDEN_XATTR: Final = "user.overlay."
_MAX_TIME_S: Final = 1 << 33
_PATH_ERRORS: Final = (errno.ELOOP, errno.ENAMETOOLONG, errno.EXDEV, errno.EINVAL)
_ENTRY_ERRORS: Final = (*_PATH_ERRORS, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EMLINK)
_ENTRY_BYTES: Final = 4096
"""Bytes counted for an entry in addition to its content: its inode, and a block for a small file."""
_INSIDE: Final = syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS


class UnpackLimits(NamedTuple):
    """Limits for an archive; one that exceeds either is refused. `bytes` counts the contents plus 4 KiB for each
    entry."""

    bytes: int
    entries: int = MAX_ENTRIES


class UnpackedLayer(NamedTuple):
    """Totals of an unpacked layer, counted as in `UnpackLimits`."""

    bytes: int
    entries: int


def unpack(
    stream: TarInput,
    folder: str,
    limits: UnpackLimits,
    *,
    whiteouts: bool,
    report: Callable[[int], None] = lambda _bytes: None,
) -> UnpackedLayer:
    """Unpack a tar into an empty folder. `report` is called often with the bytes so far. Raises ImageRefused, and
    OSError for anything that the host refuses."""
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        writer = LayerWriter(root, limits, whiteouts=whiteouts)
        try:
            for archive, member in members(stream):
                writer.add(archive, member)
                report(writer.bytes)
            writer.set_folder_times()
        finally:
            writer.close()
        return UnpackedLayer(writer.bytes, writer.entries)
    except ARCHIVE_ERRORS as error:
        raise ImageRefused(f"damaged archive: {error or type(error).__name__}") from error
    finally:
        os.close(root)


class LayerWriter:
    """Writer of a layer's entries below the folder `root` (a descriptor); close it after use."""

    def __init__(self, root: int, limits: UnpackLimits, *, whiteouts: bool) -> None:
        self._root = root
        self._limits = limits
        self._whiteouts = whiteouts
        self._parent_parts: tuple[str, ...] = ()
        self._parent_descriptor = os.dup(root)
        self._folder_times: dict[tuple[str, ...], int] = {}
        self.bytes = 0
        self.entries = 0

    def close(self) -> None:
        os.close(self._parent_descriptor)

    def add(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write one entry. Raises ImageRefused, OSError."""
        self.entries += 1
        self.bytes += _ENTRY_BYTES + (member.size if member.isreg() else 0)
        if self.entries > self._limits.entries or self.bytes > self._limits.bytes or member.size < 0:
            raise ImageRefused(
                f"the image layer has more than {self._limits.entries} entries or {self._limits.bytes} bytes: "
                "raise image_bytes (max_bytes of the image store)"
            )
        parts = split_name(member.name)
        try:
            if parts:
                self._write(self._parent(parts[:-1]), parts, archive, member)
            elif member.isdir():
                self._describe_folder(self._root, parts, member)
        except OSError as error:
            if error.errno in _ENTRY_ERRORS:
                raise ImageRefused(f"damaged archive: {member.name[:200]!r}: {error.strerror}") from error
            raise

    def _write(self, parent: int, parts: tuple[str, ...], archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = parts[-1]
        if self._whiteouts and name.startswith(_WHITEOUT):
            self._add_whiteout(parent, name)
        elif member.isdir():
            existing = _status(parent, name)
            if existing is not None and (stat.S_ISREG(existing.st_mode) or stat.S_ISLNK(existing.st_mode)):
                os.unlink(name, dir_fd=parent)
            descriptor = self._make_folder(parent, name)
            try:
                self._describe_folder(descriptor, parts, member)
            finally:
                os.close(descriptor)
        elif member.isreg():
            self._make_room(parent, name)
            content = archive.extractfile(member)
            assert content is not None
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=parent)
            try:
                while data := content.read(BUFFER_BYTES):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(descriptor, view) :]
                _describe(descriptor, member)
                os.utime(descriptor, ns=(_time_ns(member), _time_ns(member)))
            finally:
                os.close(descriptor)
        elif member.issym():
            self._make_room(parent, name)
            os.symlink(member.linkname, name, dir_fd=parent)
            os.chown(name, member.uid, member.gid, dir_fd=parent, follow_symlinks=False)
            os.utime(name, ns=(_time_ns(member), _time_ns(member)), dir_fd=parent, follow_symlinks=False)
        elif member.islnk():
            self._add_hard_link(parent, name, member)

    def _parent(self, parts: tuple[str, ...]) -> int:
        """Return the parent folder of an entry, creating it if the archive has no entry for it. It is cached for the
        next entry."""
        if parts == self._parent_parts:
            return self._parent_descriptor
        try:
            descriptor = self._open(parts)
        except (FileNotFoundError, NotADirectoryError):
            descriptor = os.dup(self._root)
            for count, name in enumerate(parts, 1):
                try:
                    below = self._open(parts[:count])
                except (FileNotFoundError, NotADirectoryError):
                    os.close(self._make_folder(descriptor, name))
                    below = self._open(parts[:count])
                finally:
                    os.close(descriptor)
                descriptor = below
        os.close(self._parent_descriptor)
        self._parent_parts, self._parent_descriptor = parts, descriptor
        return descriptor

    def _open(self, parts: tuple[str, ...]) -> int:
        try:
            return syscalls.open_resolved(self._root, "/".join(parts) or ".", os.O_RDONLY | os.O_DIRECTORY, _INSIDE)
        except OSError as error:
            if error.errno in _PATH_ERRORS:
                raise ImageRefused(f"unsafe archive: {'/'.join(parts)[:200]!r}: {error.strerror}") from error
            raise

    def _make_folder(self, parent: int, name: str) -> int:
        """Open the folder `name`, creating it if it does not exist. A folder that replaces a whiteout hides lower
        layers."""
        existing = _status(parent, name)
        hides = existing is not None and stat.S_ISCHR(existing.st_mode)
        if existing is None or hides:
            if hides:
                os.unlink(name, dir_fd=parent)
            os.mkdir(name, 0o755, dir_fd=parent)
        descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        if hides:
            mark_opaque(descriptor)
        return descriptor

    def _describe_folder(self, descriptor: int, parts: tuple[str, ...], member: tarfile.TarInfo) -> None:
        _describe(descriptor, member)
        self._folder_times[parts] = _time_ns(member)

    def set_folder_times(self) -> None:
        """Set the times of all folders; call this last, because every new entry changes the time of its folder."""
        for parts, time_ns in self._folder_times.items():
            with suppress(FileNotFoundError, NotADirectoryError):
                descriptor = self._open(parts)
                os.utime(descriptor, ns=(time_ns, time_ns))
                os.close(descriptor)

    def _make_room(self, parent: int, name: str) -> None:
        """Remove an earlier entry that a later one replaces."""
        existing = _status(parent, name)
        if existing is None:
            return
        if stat.S_ISDIR(existing.st_mode):
            raise ImageRefused(f"damaged archive: {name[:200]!r} is both a folder and another kind of file")
        os.unlink(name, dir_fd=parent)

    def _add_hard_link(self, parent: int, name: str, member: tarfile.TarInfo) -> None:
        target = split_name(member.linkname)
        if not target:
            raise ImageRefused(f"damaged archive: hard link {member.name[:200]!r} has no target")
        folder = self._open(target[:-1])
        try:
            status = _status(folder, target[-1])
            if status is None or not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
                link, to = member.name[:200], member.linkname[:200]
                raise ImageRefused(f"damaged archive: the target {to!r} of hard link {link!r} is not an earlier file")
            existing = _status(parent, name)
            if existing is None or (status.st_dev, status.st_ino) != (existing.st_dev, existing.st_ino):
                self._make_room(parent, name)
                os.link(target[-1], name, src_dir_fd=folder, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(folder)

    def _add_whiteout(self, parent: int, name: str) -> None:
        if name == _OPAQUE:
            mark_opaque(parent)
            return
        if name.startswith(_WHITEOUT_INTERNAL):
            return
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in ("", ".", ".."):
            raise ImageRefused(f"unsafe archive: whiteout {name!r} names no entry")
        existing = _status(parent, hidden)
        if existing is None:
            os.mknod(hidden, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=parent)
        elif stat.S_ISDIR(existing.st_mode):
            descriptor = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
            mark_opaque(descriptor)
            os.close(descriptor)


def mark_opaque(descriptor: int) -> None:
    """Make a folder hide the contents of the folder with the same name in lower layers."""
    os.setxattr(descriptor, "trusted.overlay.opaque", b"y")
    with suppress(OSError):
        # For mounts with `userxattr`; some file systems have no attributes in the user name space.
        os.setxattr(descriptor, "user.overlay.opaque", b"y")


def _status(parent: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _describe(descriptor: int, member: tarfile.TarInfo) -> None:
    os.fchown(descriptor, member.uid, member.gid)
    # Set after the owner, because a change of owner clears the set-id bits.
    os.fchmod(descriptor, member.mode & 0o7777)
    for header, value in member.pax_headers.items():
        name = header.removeprefix(_XATTR_HEADER)
        if name != header and name.startswith(_ALLOWED_XATTRS) and not name.startswith(_FORBIDDEN_XATTR):
            with suppress(OSError):
                os.setxattr(descriptor, name, value.encode("utf-8", "surrogateescape"))


def _time_ns(member: tarfile.TarInfo) -> int:
    return int(min(max(member.mtime, 0), _MAX_TIME_S) * 1_000_000_000)
