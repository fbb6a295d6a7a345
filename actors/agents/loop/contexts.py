"""Context policies: which messages of a conversation the policy is shown.

Invariants:
- A policy drops whole turns only: an assistant message together with the messages that answer it.
- The opening messages are always shown.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from headrace.actors.services.chat import ChatMessage

Count: TypeAlias = Callable[[Sequence[ChatMessage]], Awaitable[int]]
"""Returns the number of tokens in the prompt of messages."""
FULL: Final = "full"
_HEAD_TAIL: Final = re.compile(r"head_tail\((0?\.\d+)\)")
MARKER: Final = "[{omitted} earlier turns are omitted]"


def head_share(context: str) -> float | None:
    """Return the share of `head_tail(SHARE)`, or None for `full`. Raises ValueError for anything else."""
    if context == FULL:
        return None
    found = _HEAD_TAIL.fullmatch(context.strip())
    if found is None:
        raise ValueError(f"{context!r} is not a context policy; write full or head_tail(0.3)")
    return float(found[1])


@dataclass(slots=True, kw_only=True)
class HeadAndTail:
    """Context policy of one conversation: its first turns, a marker, and its last turns (Gen-Verse/OpenClaw-RL).

    If the whole conversation has more than `budget_tokens` tokens, the turns share what the opening messages and the
    marker leave: `head_share` of it is filled from the front, the rest from the back, by whole turns. A conversation of
    one turn, or of which nothing would be omitted, is shown whole although it is over the budget; if the opening alone
    is over it, no turn is shown."""

    budget_tokens: int
    head_share: float
    count: Count
    _sizes: list[int] = field(default_factory=list)
    """Tokens of each turn, which never change."""

    async def shown(self, opening: Sequence[ChatMessage], turns: Sequence[Sequence[ChatMessage]]) -> list[ChatMessage]:
        """Return the messages to send."""
        whole = [*opening, *(message for turn in turns for message in turn)]
        if len(turns) <= 1 or await self.count(whole) <= self.budget_tokens:
            return whole
        # The number of omitted turns is not known yet; all numbers of turns take about as many tokens.
        fixed_tokens = await self.count([*opening, marker(len(turns))])
        opening_tokens = await self.count(opening)
        for turn in turns[len(self._sizes) :]:
            self._sizes.append(await self.count([*opening, *turn]) - opening_tokens)
        head, tail = kept_turns(self._sizes, self.budget_tokens - fixed_tokens, self.head_share)
        omitted = len(turns) - head - tail
        if not omitted:
            return whole
        first = [message for turn in turns[:head] for message in turn]
        last = [message for turn in turns[len(turns) - tail :] for message in turn]
        return [*opening, *first, marker(omitted), *last]


def kept_turns(sizes: Sequence[int], available: int, head_share: float) -> tuple[int, int]:
    """Return how many turns of these sizes (in tokens) are kept at the front and at the back."""
    left = int(head_share * max(0, available))
    rest = max(0, available) - left
    head = tail = 0
    while head < len(sizes) and sizes[head] <= left:
        left -= sizes[head]
        head += 1
    while head + tail < len(sizes) and sizes[len(sizes) - 1 - tail] <= rest:
        rest -= sizes[len(sizes) - 1 - tail]
        tail += 1
    return head, tail


def marker(omitted: int) -> ChatMessage:
    """Return the message that stands for omitted turns."""
    return ChatMessage(role="user", content=MARKER.format(omitted=omitted))
