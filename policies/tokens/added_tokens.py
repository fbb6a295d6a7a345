"""The added tokens of a tokenizer: which spellings control a conversation, and where text may be cut at them.

Invariants:
- `as_data` leaves no spelling of a control token whole, and is what it was where there is none.
- Matches are those of the tokenizers library: leftmost, and the longest of those.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import AddedToken, Tokenizer

# DeepSeek's role tokens have full-width bars and are not flagged as special.
_BETWEEN_BARS = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)


class ControlTokens:
    """Tokens that structure a conversation: those flagged as special, and those spelled `<|...|>`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        self._pattern = pattern_of(token.content for token in added if _controls(token))

    def as_data(self, text: str) -> str:
        """Text in which each spelling is broken up by a space, so that it stays text; half surrogates, which no
        tokenizer takes, become U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self._pattern.sub(_broken_up, text)

    def removed(self, text: str) -> str:
        """Text without the spellings."""
        return self._pattern.sub("", text)


def pattern_of(words: Iterable[str]) -> re.Pattern[str]:
    """Finds the words, the longest first at each place; nothing when there are none."""
    distinct = sorted({word for word in words if word})
    return re.compile(_branches(distinct) if distinct else r"(?!)")


def _branches(words: list[str]) -> str:
    """A pattern as a prefix tree, so that hundreds of reserved tokens cost no more than one. `words` are sorted."""
    if len(words) == 1:
        return re.escape(words[0])
    shared = _shared_prefix(words[0], words[-1])
    rests = [word[len(shared) :] for word in words]
    may_end = rests[0] == ""
    groups: dict[str, list[str]] = {}
    for rest in rests[may_end:]:
        groups.setdefault(rest[0], []).append(rest)
    branches = "|".join(_branches(group) for group in groups.values())
    return f"{re.escape(shared)}(?:{branches}){'?' if may_end else ''}"


def _shared_prefix(first: str, last: str) -> str:
    length = next((i for i, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    return first[: min(len(first), len(last)) if length is None else length]


def _controls(token: AddedToken) -> bool:
    return token.special or _BETWEEN_BARS.fullmatch(token.content) is not None


def _broken_up(found: re.Match[str]) -> str:
    return f"{found[0][0]} {found[0][1:]}"
