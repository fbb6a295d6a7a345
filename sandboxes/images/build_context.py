"""Build contexts: the files that COPY steps copy, as layers of the image store.

Invariants:
- An archive is hostile. It is unpacked like an image layer (`layers`): names with `..` and absolute names are refused,
  links stay links, and devices are dropped. Its files are shown only inside the sandbox that copies them.
- All files belong to root: owners are set by COPY.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path
from typing import Final

from headrace.sandboxes.errors import ImageRefused
from headrace.sandboxes.images.folders import StoreFolder
from headrace.sandboxes.images.in_build import CONTEXT, GLOB
from headrace.sandboxes.images.layers import LayerWriter, UnpackLimits
from headrace.sandboxes.images.streams import ARCHIVE_ERRORS, FileRange, TarStream, members

_HEADERS_BYTES: Final = 64 << 20


def store_archive(store: StoreFolder, folder: Path, archive: Path, limits: UnpackLimits) -> str:
    """Unpack an archive (a tar, plain or compressed) into `folder`, which `StoreFolder.new_layer` made, publish it, and
    return the digest of the layer. Raises ImageRefused, OSError."""
    target = folder / "tree" / CONTEXT.strip("/")
    target.mkdir(mode=0o755)
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with archive.open("rb") as file:
            stream = TarStream(file, FileRange(str(archive)), limits.bytes + _HEADERS_BYTES)
            writer = LayerWriter(root, limits, whiteouts=False)
            try:
                for opened, member in members(stream):
                    member.uid = member.gid = 0
                    writer.add(opened, member)
                writer.set_folder_times()
            finally:
                writer.close()
            digest = stream.finish()[1]
    except ARCHIVE_ERRORS as error:
        raise ImageRefused(f"damaged archive: {error or type(error).__name__}") from error
    finally:
        os.close(root)
    archive.unlink(missing_ok=True)
    name = hashlib.sha256(f"build context {digest}".encode()).hexdigest()
    store.publish(folder, name, writer.bytes)
    return name


def store_files(store: StoreFolder, context: Path, source: str, limits: UnpackLimits) -> str:
    """Store the files of a folder on this host that match the source of a COPY, and return the digest of the layer.
    Links are stored as links. Raises ImageRefused (nothing matches, a path leads out of the folder), OSError."""
    parts = [part for part in source.split("/") if part not in ("", ".")]
    if source.startswith("/") or ".." in parts:
        raise ImageRefused(f"COPY {source}: the path leads out of the build context")
    root = context.resolve()
    pattern = "/".join(parts)
    found = sorted(root.glob(pattern)) if GLOB.search(pattern) else [root / pattern]
    found = [path for path in found if path.is_symlink() or path.exists()]
    if not found:
        raise ImageRefused(f"COPY {source}: no such file in the build context")
    for path in found:
        if not path.parent.resolve().is_relative_to(root):
            raise ImageRefused(f"COPY {source}: the path leads out of the build context")
    with store.new_layer() as folder:
        archive = folder / "archive"
        with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
            for path in found:
                _add(tar, path, root, limits)
        return store_archive(store, folder, archive, limits)


def _add(tar: tarfile.TarFile, path: Path, root: Path, limits: UnpackLimits) -> None:
    waiting = [path]
    while waiting:
        one = waiting.pop()
        if not one.is_symlink() and one.is_dir():
            waiting += sorted(one.iterdir(), reverse=True)
        info = tar.gettarinfo(one, one.relative_to(root).as_posix())
        # Equal files give equal archives, and so cached layers, wherever and whenever they were checked out.
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mtime = 0
        if info.islnk():
            info.type, info.linkname, info.size = tarfile.REGTYPE, "", one.stat().st_size
        if info.isreg():
            with one.open("rb") as file:
                tar.addfile(info, file)
        elif info.isdir() or info.issym():
            tar.addfile(info, io.BytesIO())
        if tar.offset > limits.bytes + _HEADERS_BYTES:
            raise ImageRefused(f"the build context has more than {limits.bytes} bytes")
