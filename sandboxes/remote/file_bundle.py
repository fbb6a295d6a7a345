"""Several files in one body: four bytes of length (big-endian), a JSON list of [path, size], the contents.

Invariant: the sizes add up to the body or all of it is refused.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import orjson

from headrace.sandboxes.errors import SandboxFileError, SpecRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

SPOOL_BYTES: Final = 1 << 20
"""A body above it is read, and sent, from a file."""
_LENGTH: Final = struct.Struct(">I")


def checked_path(path: str) -> str:
    """Raises SandboxFileError."""
    if "\0" in path:
        raise SandboxFileError("a path cannot hold a NUL byte")
    return path


def pack_files(files: Mapping[str, bytes]) -> bytes:
    head = orjson.dumps([(path, len(data)) for path, data in files.items()])
    return b"".join((_LENGTH.pack(len(head)), head, *files.values()))


def unpack_files(body: bytes) -> dict[str, bytes]:
    """Raises SpecRefused."""
    try:
        (length,) = _LENGTH.unpack_from(body)
        entries = orjson.loads(body[_LENGTH.size : _LENGTH.size + length])
        sizes = [(str(path), int(size)) for path, size in entries]
    except (struct.error, ValueError, TypeError) as error:
        raise SpecRefused(f"the body is no list of files: {error}") from error
    place = _LENGTH.size + length
    if any(size < 0 for _, size in sizes) or place + sum(size for _, size in sizes) != len(body):
        raise SpecRefused("the body is no list of files: its sizes do not add up")
    files = {}
    for path, size in sizes:
        files[checked_path(path)] = body[place : place + size]
        place += size
    return files
