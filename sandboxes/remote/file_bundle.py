"""Encoding of several files as one request body: a length (four bytes, big-endian), a JSON list of [path, size], and
the contents.

Invariant: a body whose size differs from the sum of the sizes is refused as a whole.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Final

import orjson

from headrace.sandboxes.errors import SandboxFileError, SpecRefused

SPOOL_BYTES: Final = 1 << 20
"""Size above which a body is streamed from or to a file instead of being held in memory."""
_LENGTH: Final = struct.Struct(">I")


def checked_path(path: str) -> str:
    """Return the path unchanged. Raises SandboxFileError if it contains a NUL byte."""
    if "\0" in path:
        raise SandboxFileError("a path must not contain a NUL byte")
    return path


def pack_files(files: Mapping[str, bytes]) -> bytes:
    head = orjson.dumps([(path, len(data)) for path, data in files.items()])
    return b"".join((_LENGTH.pack(len(head)), head, *files.values()))


def unpack_files(body: bytes) -> dict[str, bytes]:
    """Return the content of each file. Raises SpecRefused."""
    try:
        (length,) = _LENGTH.unpack_from(body)
        entries = orjson.loads(body[_LENGTH.size : _LENGTH.size + length])
        sizes = [(str(path), int(size)) for path, size in entries]
    except (struct.error, ValueError, TypeError) as error:
        raise SpecRefused(f"the request body is not a list of files: {error}") from error
    place = _LENGTH.size + length
    if any(size < 0 for _, size in sizes) or place + sum(size for _, size in sizes) != len(body):
        raise SpecRefused("the request body is not a list of files: its length differs from the sum of the sizes")
    files = {}
    for path, size in sizes:
        files[checked_path(path)] = body[place : place + size]
        place += size
    return files
