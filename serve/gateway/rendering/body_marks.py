"""Finds the bodies of messages in a rendered text, and the kinds of the tokens that follow from them.

Marks (noncharacters of Unicode) are put around each body, and the template renders the marked messages. The text
without the marks must have the ids that were sent: then the marks show the bodies, however the template escapes or
moves them.

Invariants:
- A token is part of a body if it contains at least one of its characters, as in a comparison with the rendered empty
  message.
- If a mark is missing or out of order, there are no kinds, rather than wrong ones.
- A body with warnings has marks around each of its parts, so that the template renders one text for all of them. A
  token with characters of two parts belongs to the first.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from headrace.buffer.trajectories.token_kinds import KindRuns, TokenKind, to_runs
from headrace.serve.gateway.conversation import Message, Role, Text, ToolResult, WarningText

_OPENING: Final = {TokenKind.PROMPT: "\ufdd0", TokenKind.OBSERVATION: "\ufdd1", TokenKind.WARNING: "\ufdd3"}
_KIND_OF: Final = {mark: kind for kind, mark in _OPENING.items()}
_CLOSING: Final = "\ufdd2"
_MARKS: Final = re.compile(f"[{_CLOSING}{''.join(_KIND_OF)}]")


def marked(messages: Sequence[Message], *, observed_from: int, inside: bool) -> tuple[list[Message], int]:
    """Return the messages with marks around their bodies, and the number of marked parts. Messages from the index
    `observed_from` on are observations, apart from their warnings. With `inside`, marks are put inside the white space
    at the ends of a body, for templates that remove it.

    Messages of the policy are left as they are: templates rewrite them."""
    parts = 0
    shown: list[Message] = []
    for index, message in enumerate(messages):
        if message.role is Role.ASSISTANT:
            shown.append(message)
            continue
        is_observed = index >= observed_from
        # Text blocks are joined when they are rendered; each result is a message of the template.
        blocks = message.blocks if message.role is Role.TOOL else (message,)
        changed: list[Text | ToolResult] = []
        for block in blocks:
            if not isinstance(block, Text | ToolResult | Message):
                continue
            pieces = _pieces(block) if is_observed else [(TokenKind.PROMPT, block.text)]
            text, marks = _between_marks(pieces, inside=inside)
            parts += marks
            changed.append(ToolResult(block.call_id, text) if isinstance(block, ToolResult) else Text(text))
        shown.append(Message(message.role, tuple(changed)))
    return shown, parts


def inserted(message: Message) -> tuple[str, int]:
    """Return the text of an observation that has no template around it, with marks around its parts, and their
    number."""
    return _between_marks(_pieces(message), inside=False)


def _pieces(block: Text | ToolResult | Message) -> list[tuple[TokenKind, str]]:
    """Return the parts of an observed body with their kinds; neighbours differ in kind."""
    if isinstance(block, ToolResult):
        cuts = [0, *(at for span in block.warnings for at in span), len(block.text)]
        kinds = itertools.cycle((TokenKind.OBSERVATION, TokenKind.WARNING))
        found = [(kind, block.text[start:end]) for kind, (start, end) in zip(kinds, pairwise(cuts), strict=False)]
    else:
        texts = block.blocks if isinstance(block, Message) else (block,)
        found = [
            (TokenKind.WARNING if isinstance(text, WarningText) else TokenKind.OBSERVATION, text.text)
            for text in texts
            if isinstance(text, Text | ToolResult)
        ]
    by_kind = itertools.groupby((piece for piece in found if piece[1]), key=lambda piece: piece[0])
    return [(kind, "".join(text for _, text in group)) for kind, group in by_kind]


def _between_marks(pieces: Sequence[tuple[TokenKind, str]], *, inside: bool) -> tuple[str, int]:
    """Return the text of a body with marks around its parts, and their number."""
    whole = "".join(text for _, text in pieces)
    core = whole.strip()
    if not core:
        # Templates treat an empty message differently.
        return whole, 0
    first, last = 0, len(whole)
    if inside:
        first = len(whole) - len(whole.lstrip())
        last = first + len(core)
    shown, start, marks = whole[:first], 0, 0
    for kind, text in pieces:
        if piece := whole[max(first, start) : min(last, start + len(text))]:
            shown += _OPENING[kind] + piece + _CLOSING
            marks += 1
        start += len(text)
    return shown + whole[last:], marks


def without_marks(text: str, marked_parts: int) -> tuple[str, list[tuple[int, int, TokenKind]]] | None:
    """Return the text without its marks, and the start, end and kind of each marked part in it; None unless it has the
    marks of so many parts."""
    parts, found = _MARKS.split(text), _MARKS.findall(text)
    if len(found) != 2 * marked_parts:
        return None
    spans, length = [], 0
    for number, (part, mark) in enumerate(zip(parts, found, strict=False)):
        length += len(part)
        opens = number % 2 == 0
        if opens is (mark == _CLOSING):
            return None
        if opens:
            start, kind = length, _KIND_OF[mark]
        else:
            spans.append((start, length, kind))
    return "".join(parts), spans


def kinds_of(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, TokenKind]]) -> KindRuns:
    """Return the kinds of tokens, given the characters `[start, end)` of each and the bodies in ascending order."""
    kinds_T = np.full(len(offsets), TokenKind.SCAFFOLD, dtype=np.uint8)
    if spans and offsets:
        starts_B, ends_B, kinds_B = np.array(spans).T
        starts_T, ends_T = np.array(offsets).T
        # The first body that ends behind the token's first character.
        body_T = np.searchsorted(ends_B, starts_T, side="right")
        touches_T = np.flatnonzero(body_T < len(spans))
        touches_T = touches_T[starts_B[body_T[touches_T]] < ends_T[touches_T]]
        kinds_T[touches_T] = kinds_B[body_T[touches_T]]
    return to_runs(kinds_T)
