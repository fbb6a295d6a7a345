"""Pieces of JSON documents, so that a large one need not be in memory as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import orjson


def value(document: object) -> Iterator[bytes]:
    """Yield a value as one piece."""
    yield orjson.dumps(document)


def array(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of an array; each item is an iterable of pieces."""
    opening = b"["
    for item in items:
        yield opening
        yield from item
        opening = b","
    yield b"]" if opening == b"," else b"[]"


def document(fields: Iterable[tuple[str, Iterable[bytes]]]) -> Iterator[bytes]:
    """Yield the pieces of an object; the values are iterables of pieces. They are read in order, each when the ones
    before it have been written."""
    opening = b"{"
    for name, pieces in fields:
        yield opening + orjson.dumps(name) + b":"
        yield from pieces
        opening = b","
    yield b"}" if opening == b"," else b"{}"


def joined(pieces: Iterable[bytes], *, at_least: int = 65_536) -> Iterator[bytes]:
    """Yield the same bytes in pieces of at least so many bytes, except for the last one."""
    waiting, size = list[bytes](), 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= at_least:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
