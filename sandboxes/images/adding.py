"""Images that an operator adds to the catalogue under a name, from whatever source this host has.

Invariants:
- What was added does not change with its source: folders are copied into the store, too.
- Temporary files are in the store's folder for unfinished work, which belongs to a process: the next sweep removes what
  a killed one left.
- A name is written last: before that, nothing but unused layers exists, which the next eviction may take.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from headrace.sandboxes.errors import BootFailed, ImageRefused, ImageUnknown, OutOfDisk, SandboxError, SpecRefused
from headrace.sandboxes.host.host_program import run_host_program
from headrace.sandboxes.images.catalog import BUILT, NAME, NAMED, ImageCatalog, StoredImage
from headrace.sandboxes.images.folders import new_owner, remove
from headrace.sandboxes.images.store import ImageStore

REGISTRY: Final = "docker://"
_DEBOOTSTRAP: Final = "debootstrap:"


async def add_image(
    store: ImageStore, name: str, source: str, *, packages: Sequence[str] = (), replaces: bool = False
) -> StoredImage:
    """Add an image to the store's catalogue. `source` is a reference that the store resolves, a path relative to this
    process, or `docker://REFERENCE`; `packages` are for a debootstrap suite. Raises SpecRefused (the name, or it
    exists), ImageUnknown, ImageRefused, OutOfDisk, BootFailed, CapacityExceeded."""
    if not NAME.fullmatch(name):
        raise SpecRefused(f"image name {name[:200]!r}: must have letters, digits and ._/- (at most 200)")
    if packages and not source.startswith(_DEBOOTSTRAP):
        raise SpecRefused("packages are for a debootstrap suite only: add them to the image before")
    if source.startswith((NAMED, BUILT)):
        raise SpecRefused(f"{source}: is an image of this store already")
    catalog = ImageCatalog(store.files)
    await asyncio.to_thread(store.files.prepare)
    if not replaces and await asyncio.to_thread(catalog.find, name) is not None:
        raise SpecRefused(f"image {name!r} exists: choose another name, or replace it")
    async with _located(store, source, packages) as reference:
        try:
            lease = await store.lease(reference)
        except SandboxError as error:
            # A temporary archive means nothing to the caller.
            raise type(error)(error.message.replace(reference, source)) from error
        try:
            image = lease.image
            digests = [path.parent.name for path in image.layers]
            sizes = [await asyncio.to_thread(store.files.layer_bytes, digest) for digest in digests]
            added = StoredImage(
                name=name,
                source=source + (f"+{','.join(packages)}" if packages else ""),
                digest=image.digest,
                layers=tuple(digests),
                environment=dict(image.environment),
                folder=image.folder,
                user=image.user,
                size_bytes=sum(sizes),
                created_at=time.time(),
            )
            await asyncio.to_thread(catalog.put, added)
        finally:
            await lease.release()
    return added


@asynccontextmanager
async def _located(store: ImageStore, source: str, packages: Sequence[str]) -> AsyncIterator[str]:
    """Yield a reference that the store unpacks, which may be a temporary archive."""
    if source.startswith(_DEBOOTSTRAP):
        yield source + (f"+{','.join(packages)}" if packages else "")
        return
    folder = None if source.startswith(REGISTRY) else await asyncio.to_thread(_root_file_system, source)
    if folder is None and not source.startswith(REGISTRY):
        yield source if source.startswith("/") else f"{await asyncio.to_thread(Path.cwd)}/{source}"
        return
    draft = store.files.home / "unpacking" / new_owner()
    await asyncio.to_thread(draft.mkdir)
    archive = draft / "archive"
    try:
        if folder is not None:
            # Extended attributes, but neither other file systems nor sockets.
            packing = ("tar", "--create", "--numeric-owner", "--xattrs", "--sparse", "--one-file-system", "--sort=name")
            await _run((*packing, f"--file={archive}", f"--directory={folder}", "."), source, store)
        else:
            program = shutil.which("skopeo")
            if program is None:
                raise ImageUnknown(f"{source}: registries need skopeo on this host: apt-get install skopeo")
            await _run((program, "copy", source, f"oci-archive:{archive}"), source, store)
        yield str(archive)
    finally:
        await asyncio.shield(asyncio.to_thread(remove, draft))


def _root_file_system(source: str) -> Path | None:
    """Return the folder if the source is one that is no OCI layout. Raises ImageRefused for the whole host."""
    path = Path(source).resolve()
    if not path.is_dir() or (path / "oci-layout").is_file():
        return None
    if path == Path(path.anchor):
        raise ImageRefused(f"{source}: this is the whole host; use the image `host` to get only its programs")
    return path


async def _run(command: Sequence[str], source: str, store: ImageStore) -> None:
    # No file may become larger than the store.
    status, text = await run_host_program(command, max_file_bytes=store.max_bytes)
    if status != 0:
        if status == -signal.SIGXFSZ or "File too large" in text:
            raise ImageRefused(f"{source}: is larger than the image store, {store.max_bytes} bytes: raise image_bytes")
        if "No space left" in text:
            raise OutOfDisk(f"no space left for images in {store.files.home}", 30.0)
        raise BootFailed(f"{source}: {command[0].rpartition('/')[2]} failed: {text}")
