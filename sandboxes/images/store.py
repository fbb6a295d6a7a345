"""The images of one host: a reference becomes folders that overlayfs can take as lower ones.

Invariants:
- A layer is unpacked once for all processes of the host, named by the digest of its content, and never changed after.
- What is in use (`lease`, `use`) stays; what nobody uses goes, least recently used first, once more than `max_bytes`
  lie there.
- Archives are hostile: they are opened in a child process. It outlives the call that began it, so that no short clock
  of a caller makes a large image start from zero again and again; `aclose` ends it.
- A folder with a root file system is used where it is; whoever owns it does not change it meanwhile.

References: an absolute path to a root file system folder; to a tar of one (.tar, gzip, xz, zstd); to an OCI image
layout folder; to an OCI archive or `docker save` archive; any of the last three with `:tag`; `debootstrap:SUITE`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import stat
import sys
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from headrace.sandboxes.errors import (
    BootFailed,
    CapacityExceeded,
    ImagePending,
    ImageRefused,
    ImageUnknown,
    error_from_name,
)
from headrace.sandboxes.images.debootstrap import SUITE
from headrace.sandboxes.images.folders import Owner, StoreFolder, new_owner
from headrace.sandboxes.images.merged_tree import check_usable
from headrace.sandboxes.images.worker import classify

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

_DEBOOTSTRAP: Final = "debootstrap:"
_LEASE_TRIES: Final = 3
_PENDING_S: Final = 1.0
"""Retry-After of an image that is being unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedImage:
    """What a reference means now; picklable."""

    reference: str
    digest: str
    """`sha256:<hex>` of the whole: the image id of OCI images, the content of tars, place and time of folders."""
    layers: tuple[Path, ...]
    """Folders of this host, topmost first, for overlayfs' `lowerdir`; at least one. Whiteouts are 0/0 devices, opaque
    folders carry `overlay.opaque` as trusted and as user attribute."""
    environment: Mapping[str, str]
    folder: str
    """Where commands start (WorkingDir)."""
    user: str
    """Whom commands run as unless told otherwise."""


class _Located(NamedTuple):
    """A reference that was looked up."""

    kind: str
    """`folder`, `layout`, `archive` or `debootstrap`."""
    path: str
    tag: str | None
    key: str
    """Changes when what lies there does."""


class ImageLease:
    """Keeps the layers of `image` until `release`, or until the holding process is dead."""

    def __init__(self, image: ResolvedImage, store: StoreFolder, owner: Owner) -> None:
        self.image = image
        self._store = store
        self._owner = owner

    async def release(self) -> None:
        """Idempotent."""
        await asyncio.to_thread(self._store.release, self._owner)


class ImageStore:
    """Unpacks below `folder`, which belongs to the store alone, at most about `max_bytes` (above it while more is in
    use). Several processes may use one folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._store = StoreFolder(folder)
        self._max_bytes = max_bytes
        self._unpacking: dict[str, asyncio.Task[dict[str, Any]]] = {}
        self._prepared = False

    async def aclose(self) -> None:
        """End what is being unpacked. Idempotent."""
        unpacking = list(self._unpacking.values())
        for task in unpacking:
            task.cancel()
        if unpacking:
            await asyncio.wait(unpacking)

    async def resolve(self, reference: str, *, patience_s: float | None = None) -> ResolvedImage:
        """Unpack what is not there yet; that goes on when its caller is cancelled, or loses patience (ImagePending):
        asking again finds it further. Without a lease the layers may be evicted at any time.

        Raises ImageUnknown, ImageRefused, OutOfDisk, BootFailed, ImagePending.
        """
        await self._prepare()
        located = await asyncio.to_thread(_locate, reference)
        if located.kind == "folder":
            return await asyncio.to_thread(_in_place, reference, located)
        record = await asyncio.to_thread(self._store.read_record, located.key)
        if record is None:
            record = await self._unpacked(reference, located, patience_s)
        return self._image(reference, record)

    async def _unpacked(self, reference: str, located: _Located, patience_s: float | None) -> dict[str, Any]:
        """Wait for the one task that unpacks it."""
        task = self._unpacking.get(located.key)
        if task is None:
            task = self._unpacking[located.key] = asyncio.create_task(self._unpack(reference, located))
            task.add_done_callback(lambda done: self._forget(located.key, done))
        done, _ = await asyncio.wait((task,), timeout=patience_s)
        if not done:
            raise ImagePending(f"image {reference!r} is still being unpacked", _PENDING_S)
        if task.cancelled():
            raise BootFailed(f"unpacking image {reference!r} was broken off: its store was closed")
        return task.result()

    def _forget(self, key: str, task: asyncio.Task[dict[str, Any]]) -> None:
        del self._unpacking[key]
        if not task.cancelled():
            # Perhaps nobody waits any more; whoever asks again gets an answer of their own.
            task.exception()

    async def lease(
        self, reference: str, *, holder_pid: int | None = None, patience_s: float | None = None
    ) -> ImageLease:
        """`resolve`, and keep the layers for a process, by default this one. Raises what `resolve` does,
        CapacityExceeded, ProcessLookupError."""
        for _ in range(_LEASE_TRIES):
            image = await self.resolve(reference, patience_s=patience_s)
            owner = new_owner(holder_pid)
            digests = [path.parent.name for path in image.layers if path.is_relative_to(self._store.home)]
            if not digests or await asyncio.to_thread(self._store.lease, owner, digests):
                return ImageLease(image, self._store, owner)
        raise CapacityExceeded(f"image {reference!r} was evicted at once: give the image store a larger max_bytes")

    @asynccontextmanager
    async def use(self, reference: str) -> AsyncIterator[ResolvedImage]:
        """`lease` for a block of code."""
        lease = await self.lease(reference)
        try:
            yield lease.image
        finally:
            await asyncio.shield(lease.release())

    async def _prepare(self) -> None:
        if self._prepared:
            return
        try:
            await asyncio.to_thread(self._store.prepare)
        except OSError as error:
            raise classify(error, str(self._store.home)) from error
        self._prepared = True

    async def _unpack(self, reference: str, located: _Located) -> dict[str, Any]:
        request = {**located._asdict(), "home": str(self._store.home), "max_bytes": self._max_bytes}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-m", "headrace.sandboxes.images.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate(json.dumps(request).encode() + b"\n")
        finally:
            if process.returncode is None:
                await asyncio.shield(self._kill(process))
        try:
            answer: dict[str, Any] = json.loads(output)
        except ValueError as error:
            raise BootFailed(f"unpacking image {reference!r} ended with {process.returncode}") from error
        if "error" in answer:
            raise error_from_name(str(answer["error"]), f"image {reference!r}: {answer['message']}")
        return answer

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        await asyncio.to_thread(self._store.prepare)

    def _image(self, reference: str, record: Mapping[str, Any]) -> ResolvedImage:
        return ResolvedImage(
            reference=reference,
            digest=record["digest"],
            layers=tuple(self._store.tree(digest) for digest in record["layers"]),
            environment=record["environment"],
            folder=record["folder"],
            user=record["user"],
        )


def default_image_folder() -> Path:
    """Below the user's cache folder (XDG base directory specification)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "images"


def check_reference(reference: str) -> None:
    """Refuse what can never be an image on this host, without unpacking anything. Raises ImageUnknown, ImageRefused."""
    _locate(reference)


def _locate(reference: str) -> _Located:
    """Raises ImageUnknown, ImageRefused."""
    if reference.startswith(_DEBOOTSTRAP):
        suite = reference.removeprefix(_DEBOOTSTRAP)
        if not SUITE.fullmatch(suite):
            raise ImageUnknown(f"image {reference!r}: the name of a suite, like debootstrap:bookworm")
        return _Located("debootstrap", suite, None, _key("debootstrap", suite))
    path, tag = _split_tag(reference)
    if path == Path(path.anchor):
        raise ImageRefused(f"image {reference!r}: the whole host; `host` shows its programs only")
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


def _split_tag(reference: str) -> tuple[Path, str | None]:
    """The longest part before a colon that exists is the path."""
    if not reference.startswith("/") or "\0" in reference:
        raise ImageUnknown(f"image {reference!r}: give an absolute path, debootstrap:SUITE or host")
    pieces = reference.split(":")
    for count in range(len(pieces), 0, -1):
        path = Path(":".join(pieces[:count]))
        try:
            if path.exists():
                return path.resolve(), ":".join(pieces[count:]) or None
        except OSError:
            continue
    raise ImageUnknown(f"image {reference!r}: no such file or folder")


def _key(*parts: str | int) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _in_place(reference: str, located: _Located) -> ResolvedImage:
    folder = Path(located.path)
    check_usable([folder])
    return ResolvedImage(
        reference=reference, digest=f"sha256:{located.key}", layers=(folder,), environment={}, folder="/", user="root"
    )
