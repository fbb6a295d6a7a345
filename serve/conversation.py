"""The one internal conversation model. Dialects translate to and from it; session and render know nothing else.

Invariant: contents are plain text, already joined: two messages are the same exactly when they compare equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    SYSTEM = "system"
    """Instructions; `developer` of the OpenAI wire maps to it."""
    USER = "user"
    """The task, and whatever the agent puts into the user's mouth."""
    ASSISTANT = "assistant"
    """The policy."""
    TOOL = "tool"
    """What a command or a tool printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What an agent asks for. `max_tokens` is a wish that budgets can only lower; `stop` are stop strings. The agent's
    temperature and its kin are not here on purpose: the session's sampling is law (DESIGN 7)."""

    messages: tuple[Message, ...]
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()


class TurnEnd(StrEnum):
    """Why an answer ended, for the agent."""

    STOP = "stop"
    """The policy ended its turn, or a stop string matched."""
    LENGTH = "length"
    """Tokens, context or another budget ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    """What the agent gets. Token numbers are real: of the ids the engine saw and sampled."""

    text: str
    end: TurnEnd
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
