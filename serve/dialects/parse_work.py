"""Parsing of large bodies apart from the event loop, as work for a process that renders.

Invariant: what is parsed on the event loop has at most `MOST_BYTES` and `MOST_BRACKETS`: a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from headrace.serve.rendering.render import Renderer

MOST_BYTES: Final = 1 << 20
MOST_BRACKETS: Final = 20_000
"""Objects and lists in a body, and such characters in its strings. An agent's body of 128k tokens has a few thousand; a
hostile one of a megabyte has half a million, each of which becomes a Python object."""


@dataclass(frozen=True, slots=True)
class ParseWork:
    """Parsing of a body by a dialect's method."""

    parse: Callable[[bytes, Mapping[str, str]], Any]
    body: bytes
    headers: Mapping[str, str]

    @property
    def is_large(self) -> bool:
        """True if it would block the event loop for too long."""
        body = self.body
        return len(body) > MOST_BYTES or body.count(b"{") + body.count(b"[") > MOST_BRACKETS

    def __call__(self, renderer: Renderer | None = None) -> Any:
        return self.parse(self.body, self.headers)
