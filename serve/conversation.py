"""The one internal conversation model. Dialects translate to and from it; session, render and parsing know nothing
else.

Invariants:
- What is volatile on a wire (cache_control, item ids that change, billing lines, provider fields, null against "") is
  gone: two messages with the same meaning compare equal.
- A message is what one side says in one go: the consecutive items of a wire that one sampled turn became (reasoning,
  text, calls) are one assistant message again.
- Tool results stand in messages of the role TOOL, in the order in which the agent sent them; text of the user that came
  in the same wire message follows in a message of the role USER.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Role(StrEnum):
    SYSTEM = "system"
    """Instructions; `developer` of the OpenAI wires maps to it."""
    USER = "user"
    """The task, and whatever the agent puts into the user's mouth."""
    ASSISTANT = "assistant"
    """The policy."""
    TOOL = "tool"
    """What a command or a tool printed."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """`signature` is what we minted for the turn (`TurnAnswer.turn_id`) and the agent echoed: Anthropic's `signature`,
    the Responses wire's `encrypted_content`; "" where the wire has none."""

    text: str
    signature: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON text of an object as it stands on the wire or was sampled; it may be broken JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    call_id: str
    text: str


Block: TypeAlias = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    blocks: tuple[Block, ...]

    @property
    def text(self) -> str:
        """Its text blocks and tool results, joined."""
        return "".join(block.text for block in self.blocks if isinstance(block, Text | ToolResult))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(block for block in self.blocks if isinstance(block, ToolCall))

    @property
    def rendered_texts(self) -> Iterator[str]:
        """The texts that every template shows, arguments of calls included. Many drop earlier reasoning."""
        for block in self.blocks:
            if isinstance(block, Text | ToolResult):
                yield block.text
            elif isinstance(block, ToolCall):
                yield block.name
                yield block.arguments

    @property
    def characters(self) -> int:
        """Length of `rendered_texts`."""
        return sum(map(len, self.rendered_texts))


def say(role: Role, text: str) -> Message:
    """A message of one text."""
    return Message(role, (Text(text),))


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool the agent offers. `parameters` is a JSON schema. `digest` is the same for two that differ in the order of
    keys alone; `size` is its length as JSON, in bytes. Raises TypeError for a schema that JSON cannot write, or of more
    than 250 levels."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    digest: bytes = field(init=False, repr=False, compare=False)
    size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        described = [self.name, self.description, self.parameters]
        spelled = orjson.dumps(described, default=dict, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
        object.__setattr__(self, "digest", blake2b(spelled, digest_size=16).digest())
        object.__setattr__(self, "size", len(spelled))


class Purpose(StrEnum):
    """What a request is for, as far as the wire tells."""

    TURN = "turn"
    """A turn of an agent."""
    COMPACTION = "compaction"
    """The agent has its own history summarised: trained, tagged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What an agent asks for. `max_tokens` is a wish that budgets can only lower; `stop` are stop strings; `agent`
    tells the agents of one session apart where the wire does ("" for the main one). With `calls_allowed` false, calls
    in the answer stay text. The agent's temperature and its kin are not here on purpose: the session's sampling is
    law."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    calls_allowed: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    model: str = ""
    agent: str = ""
    purpose: Purpose = Purpose.TURN

    @property
    def characters(self) -> int:
        """Length of everything that is rendered: texts, calls with their arguments, results and tools."""
        return sum(message.characters for message in self.messages) + sum(tool.size for tool in self.tools)


class TurnEnd(StrEnum):
    """Why an answer ended, for the agent."""

    STOP = "stop"
    """The policy ended its turn."""
    STOP_STRING = "stop_string"
    """A stop string of the request matched; `TurnAnswer.stop_string` says which."""
    CALLS = "calls"
    """The policy ended its turn with tool calls."""
    LENGTH = "length"
    """Tokens, context or another budget ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    """What the agent gets. `blocks` are Reasoning, Text and ToolCall in the order sampled. `turn_id` is what the wires
    mint their ids and signatures from (letters, digits, `_`, `-`). Token numbers are real: of the ids the engine saw
    and sampled."""

    turn_id: str
    blocks: tuple[Block, ...]
    end: TurnEnd
    stop_string: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.blocks if isinstance(block, Text))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(block for block in self.blocks if isinstance(block, ToolCall))
