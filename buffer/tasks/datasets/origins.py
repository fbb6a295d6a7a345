"""Where data comes from: the digest of a file or folder, and the licence that is named beside it.

Invariant: a licence is reported only by the name of a file that covers the data by its own name; it is never guessed.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

_PLAIN: Final = ("LICENSE", "LICENCE", "COPYING")
_ENDINGS: Final = ("", "txt", "md")
_MARKS: Final = (".README", ".LICENSE")


def source_digest(source: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of all regular files in a folder; hexadecimal. Raises
    OSError."""
    if not source.is_dir():
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    whole = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.is_symlink():
            whole.update(f"{path.relative_to(source).as_posix()}\0{source_digest(path)}\n".encode())
    return whole.hexdigest()


def licence_of(source: Path) -> str:
    """Return the name of the file that states the licence: a README or licence of the source's own name, or a licence
    for the whole folder. Otherwise "unknown", with the licence files near the source, which may be of other data."""
    folder = (source if source.is_dir() else source.parent).resolve()
    near = sorted(path.name for path in folder.iterdir() if path.is_file())
    own = (name for name in near for mark in _MARKS if mark in name and source.name.startswith(name.partition(mark)[0]))
    plain = (name for name in near if name.partition(".")[0] in _PLAIN and name.partition(".")[2] in _ENDINGS)
    if (found := next(iter((*own, *plain)), None)) is not None:
        return f"see {found}"
    for place, where in ((folder, "beside"), (folder.parent, "above")):
        if others := sorted(path.name for path in place.iterdir() if path.name.startswith(_PLAIN)):
            return f"unknown; {where} the data: {', '.join(others)}"
    return "unknown"
