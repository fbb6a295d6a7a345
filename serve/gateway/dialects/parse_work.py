"""Parsing of large bodies apart from the event loop, as work for a process that renders.

Invariants:
- What is parsed on the event loop has at most `MOST_BYTES`, `MOST_BRACKETS` and `MOST_ENTRIES`: a few milliseconds.
- What has more than `MAX_BRACKETS` is not parsed: each may become a Python object of 64 bytes and more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from headrace.serve.gateway.errors import BadRequest
from headrace.serve.gateway.rendering.render import Renderer

MOST_BYTES: Final = 1 << 20
MOST_BRACKETS: Final = 6_000
"""Objects and lists in a body, and such characters in its strings. An agent's body of 100k tokens has a few thousand; a
hostile one of a megabyte has half a million, each of which becomes a Python object."""
MOST_ENTRIES: Final = 500
"""Messages and calls, each of which takes some ten microseconds."""
MAX_BRACKETS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class ParseWork:
    """Parsing of a body by a dialect's method; `brackets` is what `brackets_of` returns."""

    parse: Callable[[bytes, Mapping[str, str]], Any]
    body: bytes
    headers: Mapping[str, str]
    brackets: int

    @property
    def is_large(self) -> bool:
        """True if it would block the event loop for too long."""
        body = self.body
        if len(body) > MOST_BYTES or self.brackets > MOST_BRACKETS:
            return True
        if self.brackets <= MOST_ENTRIES:
            # Each message and each call is an object.
            return False
        return body.count(b'"role"') + body.count(b'call_id"') + body.count(b'"tool_calls"') > MOST_ENTRIES

    def __call__(self, renderer: Renderer | None = None) -> Any:
        return self.parse(self.body, self.headers)


def brackets_of(body: bytes) -> int:
    """Return the number of brackets that open an object or a list, those in strings included. Raises BadRequest."""
    # Of `[` and `{` the codes differ in one bit. Where there are many, `bytes.count` takes five times as long.
    brackets = int(np.count_nonzero((np.frombuffer(body, dtype=np.uint8) | 0x20) == ord("{")))
    if brackets > MAX_BRACKETS:
        raise BadRequest(f"The body may have at most {MAX_BRACKETS} objects and lists, and this one has more.")
    return brackets
