"""Text that agents wrote, made harmless and short enough to show.

Invariants:
- Nothing here is markup: templates escape every text. This module removes what escaping leaves alone: control
  characters, marks that reorder text, and surrogates that cannot be encoded.
- A text that is cut says how much of it is missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_CHARACTERS: Final = 20_000
"""Characters of one text that are shown."""
MAX_NAME: Final = 200
"""Characters of a name, such as that of a tool or a task, that are shown."""
_HARMFUL: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""Control characters but tab and newline, invisible and reordering marks, and lone surrogates."""


@dataclass(frozen=True, slots=True)
class ShownText:
    """A text as it is shown. `cut` is the number of characters that are missing at its end."""

    text: str
    cut: int = 0


def visible(text: str) -> str:
    """Return the text with each harmful character as its escape, such as `\\x00` or `\\u202e`."""
    return _HARMFUL.sub(lambda found: _escape(ord(found.group())), text.replace("\r\n", "\n"))


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shown(text: str, limit: int = MAX_CHARACTERS) -> ShownText:
    """Return the beginning of a text; harmful characters are made visible."""
    return ShownText(visible(text[:limit]), max(0, len(text) - limit))


def name(value: object, limit: int = MAX_NAME) -> str:
    """Return a value on one line, with an ellipsis in place of what is beyond the limit."""
    text = str(value)
    line = visible(text[:limit]).replace("\n", "\\n").replace("\t", "\\t")
    return line + ("…" if len(text) > limit else "")
