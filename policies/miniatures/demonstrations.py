"""Demonstrations: conversations whose policy tokens are known, for the format warm start of a miniature."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from headrace.policies.tokens.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationMessage:
    """Message of a demonstration."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Token ids of a conversation; `trained[i]` is True if the policy produces token i."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]


class Demonstrator(Protocol):
    """Source of the demonstrations of one warm start."""

    def batch(self, count: int, *, step: int) -> list[Demonstration]:
        """Return the demonstrations of one update."""


def continued(tokenizer: ChatTokenizer, opening: Iterable[DemonstrationMessage], *pieces: str) -> Demonstration:
    """Return a conversation in which the policy writes every other piece of one message, from the first on; the others
    are inserted. Its answers end with stop strings, so that it samples no end of turn."""
    tokens = list(tokenizer.render(list(opening)))
    trained = [False] * len(tokens)
    for position, piece in enumerate(pieces):
        ids = tokenizer.encode(piece)
        tokens.extend(ids)
        trained.extend([position % 2 == 0] * len(ids))
    return Demonstration(tokens=tuple(tokens), trained=tuple(trained))


def taken_in_turns(
    tokenizer: ChatTokenizer, opening: Iterable[DemonstrationMessage], *turns: str, role: str = "user", before: str = ""
) -> Demonstration:
    """Return a conversation in which the policy writes every other turn, from the first on, and ends each with the end
    of a turn; `role` writes the others. `before` is the text that the template writes before the opening, for tools."""
    tokens = [*tokenizer.encode(before), *tokenizer.render(list(opening))]
    trained = [False] * len(tokens)
    for position, text in enumerate(turns):
        is_sampled = position % 2 == 0
        if is_sampled:
            added = (*tokenizer.encode(text), tokenizer.eos_id)
        else:
            added = tokenizer.bridge(tokenizer.eos_id, [DemonstrationMessage(role=role, content=text)])
        tokens.extend(added)
        trained.extend([is_sampled] * len(added))
    return Demonstration(tokens=tuple(tokens), trained=tuple(trained))
