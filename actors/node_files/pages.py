"""What a node and the control node say to each other about a run's files.

Invariants:
- Only logs, spans and the files of running rollouts are copied; a name is `FOLDER/FILE` and cannot leave the folder.
- An appended file (`*.jsonl`) only grows, and may be renamed (rotated). It is known by its first line, never by its
  name. Any other file is replaced as a whole, and known by the inode, time and size of that version.
- The receiver says what it has, so the sender keeps no state and a lost answer is simply asked for again.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Final

from headrace.serve.observing.retention import OLDER

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME: Final = re.compile(r"(logs/[^./][^/]*\.jsonl|running/[^./][^/]*\.json|spans/[^./][^/]*(\.jsonl|\.zst))")
FOLDERS: Final = ("running", "logs", "spans")
"""In the order in which they are copied."""
COMPRESSED: Final = ".zst"
MARKED_BYTES: Final = 4096
"""Bytes of a first line that a mark is made of, at most."""


@dataclass(frozen=True, slots=True)
class Held:
    """What the receiver has of a file: the mark of the file, and the number of bytes from its beginning."""

    mark: str
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The bytes of a file from an offset on. `is_end` is true if the file had no more when it was read."""

    name: str
    mark: str
    offset: int
    data: bytes
    is_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePage:
    """The appended files of a run on a node, by name, the names of `compressed` older ones, and the next pieces. If
    `is_end`, there is nothing more at present. A page that is not `is_settled` was read while files were renamed:
    there may be files that it does not list."""

    files: Mapping[str, Held]
    compressed: frozenset[str] = frozenset()
    pieces: tuple[Piece, ...] = ()
    is_end: bool
    is_settled: bool = True

    @property
    def size(self) -> int:
        """Number of bytes of all pieces."""
        return sum(len(piece.data) for piece in self.pieces)


EMPTY: Final = NodePage(files={}, is_end=True, is_settled=False)
"""Page of a run without a folder on the node: it says nothing about files that were there before."""


def is_appended(name: str) -> bool:
    """Return whether a file only grows, until it is renamed."""
    return name.endswith(".jsonl")


def is_older(name: str) -> bool:
    """Return whether a file has a number, which it gets by a rotation: it does not change any more."""
    return OLDER.search(PurePosixPath(name).stem) is not None


def is_kept(name: str) -> bool:
    """Return whether a file does not change any more."""
    return name.endswith(COMPRESSED) or (is_appended(name) and is_older(name))


def number_of(name: str) -> int:
    """Return the number of an older file."""
    return int(PurePosixPath(name).stem.rpartition("-")[2])


def series_of(name: str) -> str:
    """Return what the names of an appended file before and after its rotation have in common."""
    path = PurePosixPath(name)
    return f"{path.parent}/{OLDER.sub('', path.stem)}"


def mark_of(name: str, file: BinaryIO) -> str | None:
    """Return the mark of an open file. None for an appended file that has no whole line yet."""
    if not is_appended(name):
        found = os.fstat(file.fileno())
        return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    file.seek(0)
    first = file.read(MARKED_BYTES)
    end = first.find(b"\n") + 1
    if not end and len(first) < MARKED_BYTES:
        return None
    return hashlib.sha256(series_of(name).encode() + b"\n" + first[: end or MARKED_BYTES]).hexdigest()[:16]
