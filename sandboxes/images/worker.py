"""Child process that unpacks images, so that an event loop never blocks and a cancelled unpacking can be killed.

Standard input: one JSON object {home, reference, key, kind, path, tag, max_bytes}. Standard output: lines of progress
{layer, layers, bytes}, where `bytes` are those of the layer so far, and last the record of the resolved image, or
{error, message}.

Invariants: it dies with its parent. If it is killed, its files remain in `unpacking` under its own name, where the next
sweep finds them. No record is written for an image that fails its check.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

from headrace.sandboxes.errors import BootFailed, ImageRefused, ImageUnknown, OutOfDisk, SandboxError
from headrace.sandboxes.images import debootstrap
from headrace.sandboxes.images.folders import StoreFolder, new_owner
from headrace.sandboxes.images.layers import UnpackLimits, unpack
from headrace.sandboxes.images.merged_tree import check_usable
from headrace.sandboxes.images.oci_archive import ImagePlan, archive_blobs, find_image, layout_blobs, may_hold_images
from headrace.sandboxes.images.streams import FileRange, TarStream, compression_of, copy_plain
from headrace.sandboxes.linux import syscalls

_MEMORY_BYTES: Final = 4 << 30
_REPORT_S: Final = 0.5
_HEADER_BYTES: Final = 8192
"""Average number of bytes that a tar may use for each entry's headers and padding."""

Record = dict[str, Any]


def main() -> None:
    request = json.loads(sys.stdin.buffer.readline())
    syscalls.die_with_parent(signal.SIGKILL)
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        answer = Worker(StoreFolder(Path(request["home"])), request["max_bytes"]).resolve(request)
    except SandboxError as error:
        answer = {"error": type(error).__name__, "message": error.message}
    except OSError as error:
        failure = classify(error, request["home"])
        answer = {"error": type(failure).__name__, "message": failure.message}
    except MemoryError:
        answer = {"error": "ImageRefused", "message": "unsafe archive: its headers need more memory than allowed"}
    sys.stdout.write(json.dumps(answer) + "\n")


def classify(error: OSError, home: str) -> SandboxError:
    """Return the typed error for an OSError of the image store."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfDisk(f"no space left for images in {home}: free some space or choose another image_folder", 30.0)
    return BootFailed(f"unpacking an image failed: {error}")


class _Progress:
    """Reports progress on standard output, at most once every `_REPORT_S` seconds."""

    def __init__(self) -> None:
        self._layer, self._layers = 1, 1
        self._due = 0.0

    def begin(self, layer: int, layers: int) -> None:
        """A layer begins; numbers start at 1."""
        self._layer, self._layers, self._due = layer, layers, 0.0
        self.report(0)

    def report(self, done_bytes: int) -> None:
        """The layer has this many bytes so far."""
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _REPORT_S
            line = {"layer": self._layer, "layers": self._layers, "bytes": done_bytes}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


class Worker:
    """Unpacks one reference into one store."""

    def __init__(self, store: StoreFolder, max_bytes: int) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._left_bytes = max_bytes
        self._owner = new_owner()
        self._progress = _Progress()

    def resolve(self, request: Record) -> Record:
        """Return the record of an image, unpacking it if needed. Raises ImageUnknown, ImageRefused, OSError."""
        self._store.prepare()
        with self._store.lock(request["key"]):
            record = self._store.read_record(request["key"])
            if record is None:
                try:
                    record = self._build(request["kind"], request["path"], request["tag"])
                    self._store.write_record(request["key"], record)
                    self._store.evict(self._max_bytes, keep=record["layers"])
                finally:
                    self._store.release(self._owner)
        return record

    def _build(self, kind: str, path: str, tag: str | None) -> Record:
        if kind == "debootstrap":
            with self._store.new_layer() as folder:
                self._progress.report(0)
                size_bytes = debootstrap.install(path, folder / "tree")
                check_usable([folder / "tree"])
                packages = (folder / "tree/var/lib/dpkg/status").read_bytes()
                digest = hashlib.sha256(f"debootstrap {path} ".encode() + packages).hexdigest()
                self._store.publish(folder, digest, size_bytes)
            return _record([digest], digest=f"sha256:{digest}")
        if kind == "layout":
            return self._from_plan(find_image(layout_blobs(Path(path)), tag))
        with Path(path).open("rb") as file:
            compressed = compression_of(file.read(6)) is not None
        if not compressed:
            return self._from_archive(path, tag)
        with Path(path).open("rb") as file:
            if not may_hold_images(TarStream(file, FileRange(path), self._stream_bytes(self._max_bytes))):
                return self._from_tar(path, tag)
        with self._store.new_layer() as folder:
            copy_plain(FileRange(path), folder / "archive", self._stream_bytes(self._max_bytes))
            return self._from_archive(str(folder / "archive"), tag)

    def _from_archive(self, path: str, tag: str | None) -> Record:
        blobs = archive_blobs(path)
        return self._from_tar(path, tag) if blobs is None else self._from_plan(find_image(blobs, tag))

    def _from_tar(self, path: str, tag: str | None) -> Record:
        """Unpack the tar of a root file system, whose digest is known only once it is unpacked."""
        if tag is not None:
            raise ImageUnknown(f"no image {tag!r}: {path} is the tar of a root file system, which has no tags")
        with self._store.new_layer() as folder, Path(path).open("rb") as file:
            stream = TarStream(file, FileRange(path), self._stream_bytes(self._max_bytes))
            limits = UnpackLimits(self._max_bytes)
            done = unpack(stream, str(folder / "tree"), limits, whiteouts=False, report=self._progress.report)
            check_usable([folder / "tree"])
            content = f"root file system {stream.finish()[1]}"
            digest = hashlib.sha256(content.encode()).hexdigest()
            self._store.publish(folder, digest, done.bytes)
        return _record([digest], digest=f"sha256:{digest}")

    def _from_plan(self, plan: ImagePlan) -> Record:
        digests: list[str] = []
        for number, layer in enumerate(plan.layers, 1):
            self._progress.begin(number, len(plan.layers))
            with self._store.lock(layer.content_digest):
                if not self._store.tree(layer.content_digest).is_dir():
                    with self._store.new_layer() as folder, Path(layer.part.path).open("rb") as file:
                        algorithm, _, blob_hex = (layer.blob_digest or "sha256:").partition(":")
                        stream = TarStream(file, layer.part, self._stream_bytes(self._left_bytes), algorithm)
                        done = unpack(
                            stream,
                            str(folder / "tree"),
                            UnpackLimits(self._left_bytes),
                            whiteouts=True,
                            report=self._progress.report,
                        )
                        blob, content = stream.finish()
                        if content != layer.content_digest or (blob_hex and blob != blob_hex):
                            raise ImageRefused(f"damaged image: layer {layer.content_digest} does not match its digest")
                        self._left_bytes -= done.bytes
                        self._store.publish(folder, layer.content_digest, done.bytes)
            digests.insert(0, layer.content_digest)
            self._store.lease(self._owner, digests)
        check_usable([self._store.tree(digest) for digest in digests])
        record = _record(digests, digest=plan.digest)
        return {**record, "environment": plan.environment, "folder": plan.folder, "user": plan.user}

    @staticmethod
    def _stream_bytes(content_bytes: int) -> int:
        """Return the maximum length of a tar in which each entry counts as at least 4 KiB."""
        return content_bytes + _HEADER_BYTES * (content_bytes // 4096 + 1)


def _record(layers: list[str], *, digest: str) -> Record:
    return {"digest": digest, "layers": layers, "environment": {}, "folder": "/", "user": "root"}


if __name__ == "__main__":
    main()
