"""The node's side: pages of what the receiver does not have yet of a run's files.

Invariants:
- A page has at most `limit_bytes` of content; nothing else of a file is in memory.
- All pieces of a page that is settled belong to the files that it lists, also if files were renamed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from headrace.actors.record.copies.pages import (
    COMPRESSED,
    EMPTY,
    FOLDERS,
    NAME,
    NodePage,
    Piece,
    ReceivedFile,
    end_of_lines,
    is_appended,
    mark_of,
)

TRIES: Final = 5
"""Number of times that a page is read again because files were renamed meanwhile."""


def next_page(folder: Path, held: Mapping[str, ReceivedFile], *, limit_bytes: int) -> NodePage:
    """Return the next page of the files in a run's state folder for a receiver that holds these files, by name. Raises
    OSError if a file cannot be read."""
    if not folder.is_dir():
        return EMPTY
    known = {_key(name, one.mark): one for name, one in held.items()}
    for left in reversed(range(TRIES)):
        names = _names(folder)
        page = _page(folder, names, known, limit_bytes)
        # A rotation in between would hide a whole file: the newest, under its new name.
        if names == _names(folder):
            return page
        if not left:
            break
    return replace(page, is_end=False, is_settled=False)


def _page(folder: Path, names: list[str], known: Mapping[str, ReceivedFile], limit_bytes: int) -> NodePage:
    files: dict[str, ReceivedFile] = {}
    pieces: list[Piece] = []
    left_bytes, is_end = limit_bytes, True
    for name in names:
        with suppress(FileNotFoundError, IsADirectoryError), (folder / name).open("rb") as file:
            if (mark := mark_of(name, file)) is None:
                continue
            size = file.seek(0, 2)
            have = known.get(_key(name, mark))
            if is_appended(name):
                size = size if have is not None and have.size == size else end_of_lines(file, size)
                files[name] = ReceivedFile(mark, size)
            offset = 0 if have is None else min(have.size, size)
            if offset == size and have is not None:
                continue
            if left_bytes <= 0:
                is_end = False
                continue
            file.seek(offset)
            data = file.read(min(left_bytes, size - offset))
            left_bytes -= len(data)
            is_whole = offset + len(data) >= size
            is_end = is_end and is_whole
            pieces.append(Piece(name, mark, offset, data, is_whole))
    compressed = frozenset(name for name in names if name.endswith(COMPRESSED))
    return NodePage(files=files, compressed=compressed, pieces=tuple(pieces), is_end=is_end)


def _names(folder: Path) -> list[str]:
    """Return the names of the files that are copied: first those of running rollouts, which are out of date soonest,
    and last those that do not change any more."""
    found = (f"{each}/{path.name}" for each in FOLDERS for path in (folder / each).glob("*"))
    return sorted(
        filter(NAME.fullmatch, found),
        key=lambda name: (FOLDERS.index(name.partition("/")[0]), not is_appended(name), name),
    )


def _key(name: str, mark: str) -> str:
    """Return what identifies a version of a file, whatever an appended one is called now."""
    return mark if is_appended(name) else f"{name} {mark}"
