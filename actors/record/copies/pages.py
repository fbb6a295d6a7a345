"""What a node and the control node say to each other about a run's files.

Invariants:
- Only logs, spans and the files of running rollouts are copied; a name is `FOLDER/FILE` and cannot leave the folder.
- An appended file (`*.jsonl`) only grows by whole lines, and may be renamed (rotated). It is known by its first event
  (a file of spans has a line about its process before that), never by its name. Any other file is replaced as a whole,
  and known by the inode, time and size of that version.
- The receiver says what it has, so the sender keeps no state and a lost answer is simply asked for again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import BinaryIO, Final

NAME: Final = re.compile(
    r"logs/[^./][^/]*\.jsonl|running/[^./][^/]*\.json|spans/[^./][^/]*(\.jsonl|\.jsonl\.zst|\.lost\.json)"
)
FOLDERS: Final = ("running", "logs", "spans")
"""In the order in which they are copied."""
COMPRESSED: Final = ".zst"
MARKED_BYTES: Final = 16384
"""Bytes of the first lines that a mark is made of, at most."""
TAIL_BYTES: Final = 65536
"""Bytes at the end of a file in which the end of its last whole line is looked for."""
_APPENDED = re.compile(r"(?P<log>logs/.+?)(?:-(?P<n>\d{6,}))?\.jsonl|(?P<span>spans/.+?)(?:\.(?P<m>\d{6,}))?\.jsonl")


@dataclass(frozen=True, slots=True)
class ReceivedFile:
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

    files: Mapping[str, ReceivedFile]
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


def number_of(name: str) -> int:
    """Return the number that an appended file got by its rotation; 0 for the newest file."""
    match = _APPENDED.fullmatch(name)
    return int((match and (match["n"] or match["m"])) or 0)


def series_of(name: str) -> str:
    """Return what the names of an appended file before and after its rotation have in common."""
    match = _APPENDED.fullmatch(name)
    return name if match is None else match["log"] or match["span"]


def older_name(series: str, number: int) -> str:
    """Return the name of the older file of a series with this number."""
    return f"{series}{'-' if series.startswith('logs/') else '.'}{number:06d}.jsonl"


def is_older(name: str) -> bool:
    """Return whether this is the name of a rotated file, which does not change any more."""
    return is_appended(name) and number_of(name) > 0


def is_kept(name: str) -> bool:
    """Return whether a file does not change any more."""
    return name.endswith(COMPRESSED) or is_older(name)


def mark_of(name: str, file: BinaryIO) -> str | None:
    """Return the mark of an open file. None for an appended file that has no whole event yet."""
    if not is_appended(name):
        found = os.fstat(file.fileno())
        return f"{found.st_ino:x}-{found.st_mtime_ns:x}-{found.st_size:x}"
    file.seek(0)
    first, end = file.read(MARKED_BYTES), 0
    for _ in range(2 if name.startswith("spans/") else 1):
        end = first.find(b"\n", end) + 1
        if not end:
            if len(first) < MARKED_BYTES:
                return None
            end = MARKED_BYTES
            break
    return hashlib.sha256(series_of(name).encode() + b"\n" + first[:end]).hexdigest()[:16]


def end_of_lines(file: BinaryIO, size: int) -> int:
    """Return where the last whole line of the first `size` bytes ends: what follows may still be taken back, if the
    disk was full. A part of a very long line counts as whole."""
    start = max(0, size - TAIL_BYTES)
    file.seek(start)
    end = file.read(size - start).rfind(b"\n") + 1
    return start + end if end else size
