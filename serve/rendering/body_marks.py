"""Finds the bodies of messages in a rendered text, and the kinds of the tokens that follow from them.

Marks (noncharacters of Unicode) are put around each body, and the template renders the marked messages. The text
without the marks must have the ids that were sent: then the marks show the bodies, however the template escapes or
moves them.

Invariants:
- A token is part of a body if it contains at least one of its characters, as in a comparison with the rendered empty
  message.
- If a mark is missing or out of order, there are no kinds, rather than wrong ones.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np

from headrace.buffer.token_kinds import TokenKind, to_runs
from headrace.serve.conversation import Message, Role, Text, ToolResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.token_kinds import KindRuns

_OPENING: Final = {TokenKind.PROMPT: "\ufdd0", TokenKind.OBSERVATION: "\ufdd1"}
_KIND_OF: Final = {mark: kind for kind, mark in _OPENING.items()}
_CLOSING: Final = "\ufdd2"
_MARKS: Final = re.compile(f"[{_OPENING[TokenKind.PROMPT]}-{_CLOSING}]")


def marked(messages: Sequence[Message], *, observed_from: int, inside: bool) -> tuple[list[Message], int]:
    """Return the messages with marks around their bodies, and the number of bodies. Messages from the index
    `observed_from` on are observations. With `inside`, marks are put inside the white space at the ends of a body, for
    templates that remove it.

    Messages of the policy are left as they are: templates rewrite them."""
    bodies = 0
    shown: list[Message] = []
    for index, message in enumerate(messages):
        if message.role is Role.ASSISTANT:
            shown.append(message)
            continue
        kind = TokenKind.PROMPT if index < observed_from else TokenKind.OBSERVATION
        # Text blocks are joined when they are rendered; each result is a message of the template.
        blocks = message.blocks if message.role is Role.TOOL else (Text(message.text),)
        changed: list[Text | ToolResult] = []
        for block in blocks:
            if not isinstance(block, Text | ToolResult):
                continue
            text = _between_marks(block.text, kind, inside=inside)
            bodies += text is not block.text
            changed.append(Text(text) if isinstance(block, Text) else ToolResult(block.call_id, text))
        shown.append(Message(message.role, tuple(changed)))
    return shown, bodies


def _between_marks(text: str, kind: TokenKind, *, inside: bool) -> str:
    core = text.strip()
    if not core:
        # Templates treat an empty message differently.
        return text
    start, end = 0, len(text)
    if inside:
        start = len(text) - len(text.lstrip())
        end = start + len(core)
    return f"{text[:start]}{_OPENING[kind]}{text[start:end]}{_CLOSING}{text[end:]}"


def without_marks(text: str, bodies: int) -> tuple[str, list[tuple[int, int, TokenKind]]] | None:
    """Return the text without its marks, and the start, end and kind of each body in it; None unless it has the marks
    of so many bodies."""
    parts, found = _MARKS.split(text), _MARKS.findall(text)
    if len(found) != 2 * bodies:
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
