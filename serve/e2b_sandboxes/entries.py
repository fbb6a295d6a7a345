"""Files as `find -printf` tells them, and as envd shows them. Pure.

A record is `FIELDS` values, each ended by a NUL, so that no name can be mistaken for another's fields.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace.serve.e2b_sandboxes.timestamps import timestamp

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT: Final = r"%i\0%y\0%Y\0%s\0%m\0%M\0%u\0%g\0%T@\0%l\0%p\0"
"""inode, type, type behind links, size, mode, permissions, owner, group, modified, link target, path (find(1))."""
FIELDS: Final = 11
_TYPES: Final = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY"}
_DANGLING: Final = "FILE_TYPE_SYMLINK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file, folder or link. `modified_at` in seconds since the epoch."""

    inode: int
    kind: str
    target_kind: str
    """The kind behind a link; `N` when there is nothing, `L` for a circle."""
    size_bytes: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_at: float
    target: str
    path: str

    def to_json(self) -> dict[str, Any]:
        """filesystem.EntryInfo in the protobuf JSON mapping."""
        document: dict[str, Any] = {
            "name": posixpath.basename(self.path.rstrip("/")) or "/",
            "type": _TYPES.get(self.target_kind, _DANGLING if self.kind == "l" else "FILE_TYPE_UNSPECIFIED"),
            "path": self.path,
            "size": str(self.size_bytes),
            "mode": self.mode,
            "permissions": self.permissions,
            "owner": self.owner,
            "group": self.group,
            "modifiedTime": timestamp(self.modified_at),
        }
        if self.kind == "l":
            # Newer SDKs look at the mark, older ones leave out what has the type of a link.
            document |= {"isSymlink": True, "symlinkTarget": self.target}
        return document


def parse_entries(output: bytes) -> list[Entry]:
    """Whole records of `find -printf FORMAT`, by path as a walk in lexical order gives them."""
    return sorted(_records(output), key=lambda entry: entry.path.split("/"))


def _records(output: bytes) -> Iterator[Entry]:
    values = output.decode(errors="replace").split("\0")
    for start in range(0, len(values) - FIELDS, FIELDS):
        inode, kind, target_kind, size, mode, permissions, owner, group, modified, target, path = values[
            start : start + FIELDS
        ]
        yield Entry(
            inode=int(inode),
            kind=kind,
            target_kind=target_kind,
            size_bytes=int(size),
            mode=int(mode, 8) & 0o7777,
            permissions=permissions,
            owner=owner,
            group=group,
            modified_at=float(modified),
            target=target,
            path=path,
        )
