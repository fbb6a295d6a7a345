"""Tar archives of task folders, unpacked into a folder of ours.

Invariants:
- Nothing is written outside the target: members that would leave it, links and devices are refused by name, and so is
  every file that stands below one.
- Sizes and numbers of members are bounded by what is unpacked, whatever the headers and the compression say.
"""

from __future__ import annotations

import gzip
import lzma
import shutil
import tarfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Final

from headrace.buffer.tasks.datasets.rows import SourceRefused

SUFFIXES: Final = (".tar", ".tar.gz", ".tgz")
_GZIP: Final = b"\x1f\x8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveBounds:
    """Bounds of one archive."""

    file_bytes: int = 16 << 20
    """Bytes of a member; larger ones are refused."""
    total_bytes: int = 4 << 30
    """Bytes of the whole archive, decompressed; a larger archive is refused."""
    members: int = 1_000_000
    """Number of members; an archive with more is refused."""

    def why_refused(self, member: tarfile.TarInfo, path: PurePosixPath) -> str | None:
        """Return why a member is not unpacked, or None."""
        if path.is_absolute() or ".." in path.parts or "\0" in member.name:
            return "leaves the folder"
        if not member.isreg() and not member.isdir():
            return "is a link, a device or a pipe"
        if member.size > self.file_bytes:
            return f"is larger than {self.file_bytes >> 20} MiB"
        return None


class _Counted:
    """Stream that refuses to be read beyond a number of bytes."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._stream = stream
        self._left = limit

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes. Raises SourceRefused beyond the limit."""
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise SourceRefused("the archive is too large")
        return data


def is_archive(path: Path) -> bool:
    """Return whether a file's name is that of a tar archive."""
    return path.name.endswith(SUFFIXES) and path.is_file()


def unpack(stream: IO[bytes], target: Path, bounds: ArchiveBounds | None = None) -> Mapping[str, str]:
    """Unpack an archive (plain or gzip) into an empty folder, and return the refused members with the reasons. Raises
    SourceRefused for an archive that is damaged or too large, OSError."""
    bounds = bounds or ArchiveBounds()
    is_gzip = stream.read(2) == _GZIP
    stream.seek(0)
    refused: dict[str, str] = {}
    try:
        plain: IO[bytes] = gzip.GzipFile(fileobj=stream) if is_gzip else stream  # type: ignore[assignment]
        counted = _Counted(plain, bounds.total_bytes)
        with tarfile.open(fileobj=counted, mode="r|") as archive:  # type: ignore[call-overload]
            for number, member in enumerate(archive, start=1):
                if number > bounds.members:
                    raise SourceRefused(f"the archive has more than {bounds.members} members")
                path = PurePosixPath(member.name)
                if (reason := bounds.why_refused(member, path)) is not None:
                    refused[str(path)] = reason
                elif member.isdir():
                    (target / path).mkdir(parents=True, exist_ok=True)
                elif (content := archive.extractfile(member)) is not None:
                    (target / path).parent.mkdir(parents=True, exist_ok=True)
                    with (target / path).open("wb") as file:
                        shutil.copyfileobj(content, file)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, UnicodeError) as error:
        raise SourceRefused(f"the archive is damaged: {error}") from error
    except (FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        raise SourceRefused("the archive has a file and a folder of one name") from error
    return refused
