"""Image store of one host, which turns a reference into folders that overlayfs can use as lower layers.

Invariants:
- A layer is unpacked once for all processes of the host, is named by the digest of its content, and never changes
  afterwards.
- An image in use (`lease`, `use`) is retained. While the store holds more than `max_bytes`, unused images are evicted,
  least recently used first.
- Archives are hostile: a child process reads them. The child outlives the call that started it, so that callers with
  short timeouts do not restart the unpacking of a large image again and again; `aclose` ends it.
- A folder with a root file system is used in place; its owner must not change it while it is in use.

References: an absolute path to a root file system folder; to a tar of one (.tar, gzip, xz, zstd); to an OCI image
layout folder; to an OCI archive or `docker save` archive; any of the last three with `:tag`; `debootstrap:SUITE`, with
`+PACKAGE,PACKAGE` after it if it needs more; `image:NAME` for a named image; `built:KEY` for what `builder` has
recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from headrace.sandboxes.errors import (
    BootFailed,
    CapacityExceeded,
    ImagePending,
    ImageRefused,
    ImageUnknown,
    error_from_name,
)
from headrace.sandboxes.host.child_environment import child_environment
from headrace.sandboxes.images.catalog import BUILT, NAMED, ImageCatalog
from headrace.sandboxes.images.debootstrap import SUITE
from headrace.sandboxes.images.folders import Owner, StoreFolder, new_owner
from headrace.sandboxes.images.merged_tree import check_usable
from headrace.sandboxes.images.worker import classify

_DEBOOTSTRAP: Final = "debootstrap:"
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_LEASE_TRIES: Final = 3
_MAX_LINE_BYTES: Final = 16 << 20
_LOG_EVERY_S: Final = 5.0
_PENDING_S: Final = 1.0
"""Retry-After of an image that is still being unpacked."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedImage:
    """Layers and settings of a reference at the time of the call; picklable."""

    reference: str
    digest: str
    """`sha256:<hex>` of the whole image: the image id for OCI images, a digest of the content for tars, and of path and
    times for folders."""
    layers: tuple[Path, ...]
    """Folders on this host, topmost first, for overlayfs' `lowerdir`; at least one. Whiteouts are 0/0 devices, and
    opaque folders have `overlay.opaque` as both a trusted and a user attribute."""
    environment: Mapping[str, str]
    folder: str
    """Default working folder of commands (WorkingDir)."""
    user: str
    """Default user of commands."""
    shows_host: bool = False
    """True if the image was built above the image `host`, whose programs it needs."""


class UnpackProgress(NamedTuple):
    """Progress of an image that is being unpacked: the layer that is being read, and its bytes so far."""

    layer: int
    layers: int
    bytes: int


class _Located(NamedTuple):
    """Reference located on this host."""

    kind: str
    """`folder`, `layout`, `archive`, `debootstrap` or `built`."""
    path: str
    tag: str | None
    key: str
    """Key that changes when the file or folder changes."""


class ImageLease:
    """Lease of an image's layers until `release`, or until the holding process is dead."""

    def __init__(self, image: ResolvedImage, store: StoreFolder, owner: Owner) -> None:
        self.image = image
        self._store = store
        self._owner = owner

    async def release(self) -> None:
        """Release the layers. Idempotent."""
        await asyncio.to_thread(self._store.release, self._owner)


class ImageStore:
    """Image store in `folder`, which is used for nothing else. It holds about `max_bytes`, or more while the images in
    use exceed that size. Several processes may share one folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._store = StoreFolder(folder)
        self.max_bytes = max_bytes
        self._unpacking: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._prepared = False
        self._logged: dict[str, float] = {}
        self.on_progress: Callable[[str, UnpackProgress], None] = lambda _reference, _progress: None
        """Called with a reference that is being unpacked, twice a second at most."""

    @property
    def files(self) -> StoreFolder:
        """The files of this store."""
        return self._store

    async def evict(self) -> None:
        """Remove the least recently used layers beyond `max_bytes`, after something other than `resolve` has added
        some. Raises OSError."""
        if await asyncio.to_thread(self._store.size_bytes) > self.max_bytes:
            await asyncio.to_thread(self._store.evict, self.max_bytes)

    async def aclose(self) -> None:
        """Cancel all unpacking. Idempotent."""
        unpacking = list(self._unpacking.values())
        for task in unpacking:
            task.cancel()
        if unpacking:
            await asyncio.wait(unpacking)

    async def resolve(self, reference: str, *, patience_s: float | None = None) -> ResolvedImage:
        """Return the image, unpacking it if needed. Unpacking continues if the caller is cancelled or has waited for
        `patience_s` (ImagePending); the next call waits for it to finish. Without a lease, the layers may be evicted at
        any time. Raises ImageUnknown, ImageRefused, OutOfDisk, BootFailed, ImagePending."""
        if not self._prepared:
            try:
                await asyncio.to_thread(self._store.prepare)
            except OSError as error:
                raise classify(error, str(self._store.home)) from error
            self._prepared = True
        if reference.startswith(NAMED):
            return await self._named(reference)
        located = await asyncio.to_thread(_locate, reference)
        if located.kind == "folder":
            return await asyncio.to_thread(_in_place, reference, located)
        record = await asyncio.to_thread(self._store.read_record, located.key)
        if record is None and located.kind == "built":
            raise ImageUnknown(f"image {reference!r} is no longer in the store: build it again")
        if record is None:
            record = await self._unpacked(reference, located, patience_s)
        return ResolvedImage(
            reference=reference,
            digest=record["digest"],
            layers=tuple(self._store.tree(digest) for digest in record["layers"]),
            environment=record["environment"],
            folder=record["folder"],
            user=record["user"],
            shows_host=record.get("shows_host", False),
        )

    async def _named(self, reference: str) -> ResolvedImage:
        image = await asyncio.to_thread(ImageCatalog(self._store).find, reference.removeprefix(NAMED))
        if image is None:
            named = await asyncio.to_thread(ImageCatalog(self._store).all)
            known = ", ".join(one.name for one in named[:20]) or "none"
            raise ImageUnknown(f"image {reference!r}: the catalogue has no such name; it has: {known}")
        return ResolvedImage(
            reference=reference,
            digest=image.digest,
            layers=tuple(self._store.tree(digest) for digest in image.layers),
            environment=image.environment,
            folder=image.folder or "/",
            user=image.user or "root",
            shows_host=image.shows_host,
        )

    async def _unpacked(self, reference: str, located: _Located, patience_s: float | None) -> dict[str, Any]:
        """Wait for the single task that unpacks an image, starting it if there is none."""

        def forget(done: asyncio.Task[dict[str, Any]]) -> None:
            del self._unpacking[located.key]
            self._logged.pop(reference, None)
            if not done.cancelled():
                # Mark the error as retrieved, in case no caller waits any more.
                done.exception()

        task = self._unpacking.get(located.key)
        if task is None:
            task = self._unpacking[located.key] = asyncio.create_task(self._unpack(reference, located))
            task.add_done_callback(forget)
        done, _ = await asyncio.wait((task,), timeout=patience_s)
        if not done:
            raise ImagePending(f"image {reference!r} is still being unpacked", _PENDING_S)
        if task.cancelled():
            raise BootFailed(f"unpacking image {reference!r} was cancelled: the image store was closed")
        return task.result()

    async def lease(
        self, reference: str, *, holder_pid: int | None = None, patience_s: float | None = None
    ) -> ImageLease:
        """Resolve a reference and lease its layers to a process, by default this one. Raises the errors that `resolve`
        raises, CapacityExceeded, ProcessLookupError."""
        for _ in range(_LEASE_TRIES):
            image = await self.resolve(reference, patience_s=patience_s)
            owner = new_owner(holder_pid)
            digests = [path.parent.name for path in image.layers if path.is_relative_to(self._store.home)]
            if not digests or await asyncio.to_thread(self._store.lease, owner, digests):
                return ImageLease(image, self._store, owner)
        raise CapacityExceeded(
            f"image {reference!r} was evicted before it was leased: raise image_bytes (max_bytes of the image store)"
        )

    @asynccontextmanager
    async def use(self, reference: str) -> AsyncIterator[ResolvedImage]:
        """Lease an image for the duration of a `with` block."""
        lease = await self.lease(reference)
        try:
            yield lease.image
        finally:
            await asyncio.shield(lease.release())

    async def _unpack(self, reference: str, located: _Located) -> dict[str, Any]:
        request = {**located._asdict(), "home": str(self._store.home), "max_bytes": self.max_bytes}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-m", "headrace.sandboxes.images.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        began, output = time.monotonic(), b""
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.close()
            async for output in process.stdout:
                self._note_progress(reference, began, output)
            await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await asyncio.shield(self._clean_up(process))
        try:
            answer: dict[str, Any] = json.loads(output)
            if "digest" not in answer and "error" not in answer:
                raise ValueError("the last line is not an answer")
        except ValueError as error:
            raise BootFailed(f"unpacking image {reference!r} ended with status {process.returncode}") from error
        if "error" in answer:
            raise error_from_name(str(answer["error"]), f"image {reference!r}: {answer['message']}")
        return answer

    def _note_progress(self, reference: str, began: float, line: bytes) -> None:
        """Remember a line of the worker's progress, and log it now and then."""
        with suppress(ValueError, KeyError):
            report = json.loads(line)
            progress = UnpackProgress(layer=report["layer"], layers=report["layers"], bytes=report["bytes"])
            self.on_progress(reference, progress)
            elapsed_s = time.monotonic() - began
            if elapsed_s >= self._logged.get(reference, -_LOG_EVERY_S) + _LOG_EVERY_S:
                self._logged[reference] = elapsed_s
                text = "image %s: unpacking layer %d of %d, %d MiB of it so far, %.0f s"
                logger.info(text, reference, progress.layer, progress.layers, progress.bytes >> 20, elapsed_s)

    async def _clean_up(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        await asyncio.to_thread(self._store.prepare)


def default_image_folder() -> Path:
    """Return the image folder below the user's cache folder (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "images"


def check_reference(reference: str) -> None:
    """Check that a reference can be an image on this host, without unpacking it. Raises ImageUnknown, ImageRefused."""
    _locate(reference)


def _locate(reference: str) -> _Located:
    """Find a reference on this host. Raises ImageUnknown, ImageRefused."""
    if reference.startswith(_DEBOOTSTRAP):
        suite = reference.removeprefix(_DEBOOTSTRAP)
        if not SUITE.fullmatch(suite):
            raise ImageUnknown(
                f"image {reference!r}: give a suite and perhaps packages, like debootstrap:bookworm+git,python3"
            )
        return _Located("debootstrap", suite, None, _key("debootstrap", suite))
    if reference.startswith(NAMED):
        # Only the store knows its names.
        return _Located("named", "", None, "")
    if reference.startswith(BUILT):
        key = reference.removeprefix(BUILT)
        if not _KEY.fullmatch(key):
            raise ImageUnknown(f"image {reference!r}: give 64 hexadecimal digits")
        return _Located("built", "", None, key)
    if not reference.startswith("/") or "\0" in reference:
        raise ImageUnknown(f"image {reference!r}: give an absolute path, debootstrap:SUITE or host")
    # The longest part before a colon that exists is the path.
    pieces = reference.split(":")
    for count in range(len(pieces), 0, -1):
        path = Path(":".join(pieces[:count]))
        with suppress(OSError):
            if path.exists():
                path, tag = path.resolve(), ":".join(pieces[count:]) or None
                break
    else:
        raise ImageUnknown(f"image {reference!r}: no such file or folder")
    if path == Path(path.anchor):
        raise ImageRefused(f"image {reference!r}: this is the whole host; use `host` to get only its programs")
    identity = path / "index.json" if (path / "oci-layout").is_file() else path
    try:
        status = identity.stat()
    except OSError as error:
        raise ImageUnknown(f"image {reference!r}: {error.strerror}") from error
    key = _key(str(path), status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size, tag or "")
    if stat.S_ISREG(status.st_mode) and identity == path:
        return _Located("archive", str(path), tag, key)
    if not path.is_dir():
        raise ImageRefused(f"image {reference!r}: neither a folder nor a regular file")
    if identity != path:
        return _Located("layout", str(path), tag, key)
    if tag is not None:
        raise ImageUnknown(f"image {reference!r}: a root file system has no tags")
    return _Located("folder", str(path), None, key)


def _key(*parts: str | int) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _in_place(reference: str, located: _Located) -> ResolvedImage:
    folder = Path(located.path)
    check_usable([folder])
    return ResolvedImage(
        reference=reference, digest=f"sha256:{located.key}", layers=(folder,), environment={}, folder="/", user="root"
    )
