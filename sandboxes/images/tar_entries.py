"""Entries of a hostile tar, read one after the other with the standard library.

Invariants: no entry is retained. Every defect of the archive is ImageRefused; an archive that breaks off without its
end mark (two blocks of zeros, POSIX pax) is damaged, not short.
"""

from __future__ import annotations

import tarfile
from typing import IO, TYPE_CHECKING, Final, Protocol, cast

from headrace.sandboxes.errors import ImageRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

DAMAGE: Final = (tarfile.TarError, ValueError, OverflowError, RecursionError, MemoryError)
"""Exceptions from reading or using an entry of a damaged archive."""


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
    except DAMAGE as error:
        raise ImageRefused(f"damaged archive: {error or type(error).__name__}") from error
    while True:
        try:
            member = archive.next()
        except DAMAGE as error:
            raise ImageRefused(f"damaged archive: {error or type(error).__name__}") from error
        if member is None:
            break
        yield archive, member
        archive.members = []  # type: ignore[attr-defined]
    if not stream.last or stream.last.strip(b"\0"):
        raise ImageRefused("damaged archive: the end mark is missing, or an entry has no valid header")


def split_name(name: str) -> tuple[str, ...]:
    """Return the parts of a name in an archive, none for its root. Raises ImageRefused for `..` and absolute names."""
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise ImageRefused(f"unsafe archive: the name {name[:200]!r} is absolute or contains '..'")
    return parts
