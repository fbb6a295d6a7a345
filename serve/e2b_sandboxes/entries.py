"""File metadata: parsing of `find -printf` output, and envd's JSON form. Pure.

A record is `FIELDS` values, each terminated by a NUL, so that no file name can be confused with another field.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any, Final

from headrace.serve.e2b_sandboxes.bodies import timestamp

FORMAT: Final = r"%i\0%y\0%Y\0%s\0%m\0%M\0%u\0%g\0%T@\0%l\0%p\0"
"""inode, type, type behind links, size, mode, permissions, owner, group, modified, link target, path (find(1))."""
FIELDS: Final = 11
_TYPES: Final = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY"}
_DANGLING: Final = "FILE_TYPE_SYMLINK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One file, folder or link. `modified_at` is in Unix seconds."""

    inode: int
    kind: str
    target_kind: str
    """The kind of a link's target; `N` if it does not exist, `L` for a loop."""
    size_bytes: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_at: float
    target: str
    path: str

    def to_json(self) -> dict[str, Any]:
        """Return filesystem.EntryInfo in the protobuf JSON mapping."""
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
            # Newer SDKs use this mark; older ones omit entries with the type of a link.
            document |= {"isSymlink": True, "symlinkTarget": self.target}
        return document


def parse_entries(output: bytes) -> list[Entry]:
    """Parse complete records of `find -printf FORMAT`, sorted by path in the order of a lexical walk. Raises
    ValueError."""
    values = output.decode(errors="replace").split("\0")
    entries = []
    for start in range(0, len(values) - FIELDS, FIELDS):
        inode, kind, target_kind, size, mode, permissions, owner, group, modified, target, path = values[
            start : start + FIELDS
        ]
        entry = Entry(
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
        entries.append(entry)
    return sorted(entries, key=lambda entry: entry.path.split("/"))
