"""The entries of a hostile tar, one after the other, by the standard library's reader.

Invariants: none is kept; whatever is wrong with the archive is ImageRefused; one that breaks off without its end mark
(two blocks of zeros, POSIX pax) is damaged, not short.
"""

from __future__ import annotations

import tarfile
from typing import IO, TYPE_CHECKING, Final, Protocol, cast

from headrace.sandboxes.errors import ImageRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

DAMAGE: Final = (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError)
"""What reading or using an entry of a damaged archive raises."""


class TarInput(Protocol):
    """What `tarfile` asks of a file; `last` is the piece it read last."""

    last: bytes

    def read(self, size: int, /) -> bytes: ...

    def seek(self, position: int, /) -> int: ...

    def tell(self) -> int: ...


def members(stream: TarInput) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The entries of a tar, none of which is kept. Raises ImageRefused where it does not end as a tar ends."""
    archive, member = _first_member(stream)
    while member is not None:
        yield archive, member
        archive.members = []  # type: ignore[attr-defined]
        member = _next_member(archive)
    if not stream.last or stream.last.strip(b"\0"):
        raise ImageRefused("damaged archive: no end mark, or bytes that are no header")


def _first_member(stream: TarInput) -> tuple[tarfile.TarFile, tarfile.TarInfo | None]:
    try:
        archive = tarfile.TarFile.open(fileobj=cast("IO[bytes]", stream), mode="r:", errorlevel=2)
    except DAMAGE as error:
        raise ImageRefused(f"damaged archive: {error or type(error).__name__}") from error
    return archive, _next_member(archive)


def _next_member(archive: tarfile.TarFile) -> tarfile.TarInfo | None:
    try:
        return archive.next()
    except DAMAGE as error:
        raise ImageRefused(f"damaged archive: {error or type(error).__name__}") from error


def split_name(name: str) -> tuple[str, ...]:
    """The parts of a name in an archive; empty for its root. Raises ImageRefused for `..` and absolute names."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ImageRefused(f"unsafe archive: name {name[:200]!r}")
    return parts
