"""Reading hostile archives as streams: decompressed, counted and hashed on the way.

Invariants:
- A stream goes forward only and holds one buffer; a bomb ends as ImageRefused once it passes its cap.
- Damage of any compression format is ImageRefused; an error of the disk stays an OSError.
- `finish` has read every byte of the source, so that both digests cover all of it.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import zlib
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

import zstandard

from headrace.sandboxes.errors import ImageRefused

if TYPE_CHECKING:
    from pathlib import Path

BUFFER_BYTES: Final = 1 << 20
_MAX_READ_BYTES: Final = 16 << 20
"""File contents are read in smaller pieces: a longer one is a header (pax, long name) that would fill the memory."""
_MAX_WINDOW_BYTES: Final = 1 << 27
_MAX_LZMA_BYTES: Final = 1 << 28
_MAGIC: Final = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    # Skippable frames: where zstd:chunked and seekable files begin with one.
    b"\x50\x2a\x4d\x18": "zstd",
}
_DAMAGE: Final = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zstandard.ZstdError)


class FileRange(NamedTuple):
    """Part of a file: a blob of its own, or a member of an uncompressed tar."""

    path: str
    offset: int = 0
    size: int | None = None
    """None: to the end."""


class RangeReader(io.RawIOBase):
    """The bytes of a FileRange, hashed as they pass."""

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
    """What `tarfile` reads an archive from: plain bytes, forward only, at most `max_bytes`."""

    def __init__(self, source: BinaryIO, part: FileRange, max_bytes: int, algorithm: str = "sha256") -> None:
        self._raw = RangeReader(source, part, algorithm)
        self._buffered = io.BufferedReader(self._raw, BUFFER_BYTES)
        self._plain = _decompressed(self._buffered)
        self._position = 0
        self._max_bytes = max_bytes
        self._hash = hashlib.sha256()
        self.last = b""
        """The piece read last: of an archive that ended well it is a block of zeros."""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        if position < self._position:
            raise ImageRefused("damaged archive: a header of impossible size")
        while self._position < position:
            if not self.read(min(BUFFER_BYTES, position - self._position)):
                raise ImageRefused("damaged archive: it ends early")
        return position

    def read(self, size: int) -> bytes:
        if size > _MAX_READ_BYTES:
            raise ImageRefused(f"unsafe archive: a header of {size} bytes")
        parts, missing = [], size
        try:
            while missing > 0 and (part := self._plain.read(missing)):
                parts.append(part)
                missing -= len(part)
        except _DAMAGE as error:
            raise ImageRefused(f"damaged archive: {error}") from error
        self.last = b"".join(parts)
        self._position += len(self.last)
        self._hash.update(self.last)
        if self._position > self._max_bytes:
            raise ImageRefused(f"archive of more than {self._max_bytes} bytes: give the image store a larger max_bytes")
        return self.last

    def finish(self) -> tuple[str, str]:
        """Read what is left. Returns the hex digests of the file as it lies there and of its plain content (sha256)."""
        last = self.last
        while self.read(BUFFER_BYTES):
            pass
        self.last = last
        while self._buffered.read(BUFFER_BYTES):
            pass
        return self._raw.hash.hexdigest(), self._hash.hexdigest()


def compression_of(start: bytes) -> str | None:
    """`gzip`, `xz` or `zstd` by the first bytes of a file; None for a plain one."""
    if len(start) >= 4 and start[1:4] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F:
        return "zstd"
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), None)


def _decompressed(file: io.BufferedReader[RangeReader]) -> BinaryIO:
    kind = compression_of(file.peek(6)[:6])
    if kind == "gzip":
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if kind == "xz":
        return _XzReader(file)  # type: ignore[return-value]
    if kind == "zstd":
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        return decompressor.stream_reader(file, read_across_frames=True)
    return file


class _XzReader:
    """lzma.LZMAFile takes no limit of memory: the size of the dictionary is the archive's own word."""

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
    """Decompress a whole file. Raises ImageRefused, OSError."""
    with open(part.path, "rb") as source, target.open("xb") as copy:  # noqa: PTH123 - FileRange holds text: it crosses a process
        stream = TarStream(source, part, max_bytes)
        while data := stream.read(BUFFER_BYTES):
            copy.write(data)
