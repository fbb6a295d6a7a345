"""Finds the added tokens of a tokenizer in text, and escapes those that control a conversation.

Invariants:
- The result of `as_data` contains no control token, and equals its input if that contains none.
- Matches are those of the tokenizers library: the leftmost match, and the longest one at that position.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# DeepSeek's role tokens have full-width bars and are not flagged as special.
_BETWEEN_BARS = re.compile(r"<[|\uff5c].+[|\uff5c]>", re.DOTALL)


class ControlTokens:
    """Tokens that structure a conversation: those flagged as special, and those of the form `<|...|>`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        self._pattern = pattern_of(
            token.content for token in added if token.special or _BETWEEN_BARS.fullmatch(token.content)
        )

    def as_data(self, text: str) -> str:
        """Return the text with a space inserted into each control token, so that the token is treated as text. Lone
        surrogates, which no tokenizer accepts, become U+FFFD."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        return self._pattern.sub(_broken_up, text)

    def removed(self, text: str) -> str:
        """Return the text without control tokens."""
        return self._pattern.sub("", text)


def pattern_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest of the words at each position; it finds nothing without words."""
    distinct = sorted({word for word in words if word})
    return re.compile(_branches(distinct) if distinct else r"(?!)")


def _branches(words: list[str]) -> str:
    """Return the pattern of sorted words as a prefix tree: hundreds of reserved tokens cost no more than one."""
    if len(words) == 1:
        return re.escape(words[0])
    shared = os.path.commonprefix([words[0], words[-1]])  # noqa: RUF071 - characters of words, not of paths
    rests = [word[len(shared) :] for word in words]
    may_end = rests[0] == ""
    groups: dict[str, list[str]] = {}
    for rest in rests[may_end:]:
        groups.setdefault(rest[0], []).append(rest)
    branches = "|".join(_branches(group) for group in groups.values())
    return f"{re.escape(shared)}(?:{branches}){'?' if may_end else ''}"


def _broken_up(found: re.Match[str]) -> str:
    return f"{found[0][0]} {found[0][1:]}"
