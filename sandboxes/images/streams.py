"""Streams over hostile archives and their tar entries. An archive is decompressed, counted and hashed while it is read.

Invariants:
- A stream is read forward only and holds one buffer; a decompression bomb raises ImageRefused once it exceeds its
  limit.
- Damaged data in any compression format raises ImageRefused; a disk error stays an OSError.
- `finish` reads the source to its end, so that both digests cover every byte.
- No tar entry is retained. An archive that breaks off without its end mark (two blocks of zeros, POSIX pax) is damaged,
  not short.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO, Final, NamedTuple, Protocol, cast

import zstandard

from headrace.sandboxes.errors import ImageRefused

BUFFER_BYTES: Final = 1 << 20
_MAX_READ_BYTES: Final = 16 << 20
"""Contents are read in smaller pieces, so a longer read is for a header (pax, long name) and would fill up memory."""
_MAX_WINDOW_BYTES: Final = 1 << 27
_MAX_LZMA_BYTES: Final = 1 << 28
_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    # A skippable frame, with which zstd:chunked and seekable files begin.
    b"\x50\x2a\x4d\x18": "zstd",
}
ARCHIVE_ERRORS: Final = (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError)
"""Exceptions from reading or using an entry of a damaged archive."""
_COMPRESSION_ERRORS: Final = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zstandard.ZstdError)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class FileRange(NamedTuple):
    """Part of a file: an entire blob file, or a member of an uncompressed tar."""

    path: str
    offset: int = 0
    size: int | None = None
    """None means up to the end of the file."""


class RangeReader(io.RawIOBase):
    """Reader of a FileRange that hashes the bytes it reads."""

    def __init__(self, file: BinaryIO, part: FileRange, algorithm: str) -> None:
        self._file = file
        self._file.seek(part.offset)
        self._left = part.size
        self.hash = hashlib.new(algorithm)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        wanted = len(buffer) if self._left is None else min(len(buffer), self._left)
        data = self._file.read(wanted)
        if self._left is not None:
            self._left -= len(data)
        buffer[: len(data)] = data
        self.hash.update(data)
        return len(data)


class TarStream:
    """File interface over an archive for `tarfile`: decompressed, forward only, at most `max_bytes`."""

    def __init__(self, source: BinaryIO, part: FileRange, max_bytes: int, algorithm: str = "sha256") -> None:
        self._raw = RangeReader(source, part, algorithm)
        self._buffered = io.BufferedReader(self._raw, BUFFER_BYTES)
        kind = compression_of(self._buffered.peek(6)[:6])
        self._plain: _Readable = self._buffered
        if kind == "gzip":
            self._plain = gzip.GzipFile(fileobj=self._buffered)
        elif kind == "xz":
            self._plain = _XzReader(self._buffered)
        elif kind == "zstd":
            decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
            self._plain = decompressor.stream_reader(self._buffered, read_across_frames=True)
        self._position = 0
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()
        self.last = b""
        """The piece that was read last; at the end of an undamaged archive it is a block of zeros."""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        if position < self._position:
            raise ImageRefused("damaged archive: a header has an impossible size")
        while self._position < position:
            if not self.read(min(BUFFER_BYTES, position - self._position)):
                raise ImageRefused("damaged archive: it ends before its last entry")
        return position

    def read(self, size: int) -> bytes:
        if size > _MAX_READ_BYTES:
            raise ImageRefused(f"unsafe archive: a header has {size} bytes")
        parts, missing = [], size
        try:
            while missing > 0 and (part := self._plain.read(missing)):
                parts.append(part)
                missing -= len(part)
        except _COMPRESSION_ERRORS as error:
            raise ImageRefused(f"damaged archive: {error}") from error
        self.last = b"".join(parts)
        self._position += len(self.last)
        self._hash.update(self.last)
        if self._position > self._max_bytes:
            advice = "raise image_bytes (max_bytes of the image store)"
            raise ImageRefused(f"the archive has more than {self._max_bytes} bytes: {advice}")
        return self.last

    def finish(self) -> tuple[str, str]:
        """Read the rest and return the hex digests of the file as stored and of its decompressed content (sha256)."""
        last = self.last
        while self.read(BUFFER_BYTES):
            pass
        self.last = last
        while self._buffered.read(BUFFER_BYTES):
            pass
        return self._raw.hash.hexdigest(), self._hash.hexdigest()


def compression_of(start: bytes) -> str | None:
    """Return `gzip`, `xz` or `zstd`, detected from a file's first bytes, or None if the file is not compressed."""
    if len(start) >= 4 and start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F:
        return "zstd"
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


class _XzReader:
    """Replacement for lzma.LZMAFile, which has no memory limit although the archive chooses the dictionary size."""

    def __init__(self, file: io.BufferedReader[RangeReader]) -> None:
        self._file = file
        self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_LZMA_BYTES)

    def read(self, size: int) -> bytes:
        while True:
            if self._decompressor.eof:
                rest = self._decompressor.unused_data.lstrip(b"\0") or self._file.read(BUFFER_BYTES).lstrip(b"\0")
                if not rest:
                    return b""
                self._decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_LZMA_BYTES)
            elif self._decompressor.needs_input:
                rest = self._file.read(BUFFER_BYTES)
                if not rest:
                    raise EOFError("compressed file ended before the end-of-stream marker was reached")
            else:
                rest = b""
            if data := self._decompressor.decompress(rest, size):
                return data


def copy_plain(part: FileRange, target: Path, max_bytes: int) -> None:
    """Decompress a whole file into a new one. Raises ImageRefused, OSError."""
    with open(part.path, "rb") as source, target.open("xb") as copy:  # noqa: PTH123 - FileRange holds text: it crosses a process
        stream = TarStream(source, part, max_bytes)
        while data := stream.read(BUFFER_BYTES):
            copy.write(data)


class TarInput(Protocol):
    """File interface that `tarfile` needs; `last` is the piece that was read last."""

    last: bytes

    def read(self, size: int, /) -> bytes: ...

    def seek(self, position: int, /) -> int: ...

    def tell(self) -> int: ...


def members(stream: TarInput) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the entries of a tar without retaining them. Raises ImageRefused for an archive without its end mark."""
    try:
        archive = tarfile.TarFile.open(fileobj=cast("IO[bytes]", stream), mode="r:", errorlevel=2)
        while (member := archive.next()) is not None:
            yield archive, member
            archive.members = []  # type: ignore[attr-defined]
    except ARCHIVE_ERRORS as error:
        raise ImageRefused(f"damaged archive: {error or type(error).__name__}") from error
    if not stream.last or stream.last.strip(b"\0"):
        raise ImageRefused("damaged archive: the end mark is missing, or an entry has no valid header")


def split_name(name: str) -> tuple[str, ...]:
    """Return the parts of a name in an archive, empty for its root. Raises ImageRefused for `..` and absolute names."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ImageRefused(f"unsafe archive: the name {name[:200]!r} is absolute or contains '..'")
    return parts
