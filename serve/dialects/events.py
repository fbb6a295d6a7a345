"""The encoding of server-sent events.

Invariant: an event is one line of data whatever its text, also for readers that split lines at Unicode line ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

COMMENT = b": ping\n\n"
"""Comment line, which every reader of events ignores."""
DONE = b"data: [DONE]\n\n"
# Line ends of Python's splitlines, which HTTP libraries use. JSON itself escapes the others, below 0x20.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def data(document: Mapping[str, object]) -> bytes:
    """Return an event without a name."""
    line = orjson.dumps(document)
    for raw, escaped in _LINE_ENDS:
        line = line.replace(raw, escaped)
    return b"data: " + line + b"\n\n"


def event(document: Mapping[str, object]) -> bytes:
    """Return an event named after the document's `type`."""
    return f"event: {document['type']}\n".encode() + data(document)
