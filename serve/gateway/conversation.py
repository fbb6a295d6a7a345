"""The internal conversation model, to and from which the dialects translate.

Invariants:
- Volatile parts of a wire format (cache_control, changing item ids, billing lines, provider fields, null versus "") are
  removed: two messages with the same meaning compare equal.
- A message is one side's turn: the consecutive wire items of one sampled turn (reasoning, text, calls) are merged back
  into one assistant message.
- Tool results are in messages with the role TOOL, in the order in which the agent sent them; user text from the same
  wire message follows in a message with the role USER.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from hashlib import blake2b
from typing import Any, TypeAlias

import orjson


class Role(StrEnum):
    SYSTEM = "system"
    """Instructions; also the role `developer` of OpenAI's APIs."""
    USER = "user"
    """The task and other messages that the agent sends as the user."""
    ASSISTANT = "assistant"
    """The policy."""
    TOOL = "tool"
    """Output of a command or a tool."""


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class WarningText(Text):
    """Text of a user's message that is a remark about the policy's turn."""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The policy's reasoning. `signature` is the id of its turn (`TurnAnswer.turn_id`), which the agent echoes as
    Anthropic's `signature` or the Responses API's `encrypted_content`; "" if the API has neither."""

    text: str
    signature: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Tool call. `arguments` is the JSON text of an object, as received or as sampled; it may be invalid."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of a call. The characters `[start, end)` of each of the `warnings` are remarks about the policy's turn;
    results that differ only in them are equal."""

    call_id: str
    text: str
    warnings: tuple[tuple[int, int], ...] = field(default=(), compare=False)


Block: TypeAlias = Text | Reasoning | ToolCall | ToolResult


@dataclass(frozen=True, slots=True)
class Message:
    role: Role
    blocks: tuple[Block, ...]

    @property
    def text(self) -> str:
        """The text blocks and tool results, joined."""
        return "".join(block.text for block in self.blocks if isinstance(block, Text | ToolResult))

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        return tuple(block for block in self.blocks if isinstance(block, ToolCall))

    @property
    def rendered_texts(self) -> Iterator[str]:
        """The strings that every template renders, including call arguments. Reasoning is excluded, because many
        templates drop earlier reasoning."""
        for block in self.blocks:
            if isinstance(block, Text | ToolResult):
                yield block.text
            elif isinstance(block, ToolCall):
                yield block.name
                yield block.arguments

    @property
    def characters(self) -> int:
        """Total length of `rendered_texts`."""
        return sum(map(len, self.rendered_texts))


def ending_of(message: Message, start: int) -> Message:
    """Return the text of a message from the character `start` on, with its warnings."""
    texts: list[Text] = []
    for block in message.blocks:
        if isinstance(block, Text):
            if text := block.text[max(0, start) :]:
                texts.append(type(block)(text))
            start -= len(block.text)
    return Message(message.role, tuple(texts) or (Text(""),))


def without_warnings(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with all warnings as plain text."""
    return tuple(Message(message.role, tuple(map(_plain, message.blocks))) for message in messages)


def _plain(block: Block) -> Block:
    if isinstance(block, WarningText):
        return Text(block.text)
    return ToolResult(block.call_id, block.text) if isinstance(block, ToolResult) else block


def say(role: Role, text: str) -> Message:
    """Return a message that consists of one text block."""
    return Message(role, (Text(text),))


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """Tool that the agent offers. `parameters` is a JSON schema. `digest` does not depend on the order of keys; `size`
    is the length of the description as JSON, in bytes. Raises TypeError for a schema that cannot be written as JSON or
    that has more than 250 levels of nesting."""

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

    @property
    def schema(self) -> str:
        """The JSON schema of the parameters as text."""
        return orjson.dumps(self.parameters, default=dict, option=orjson.OPT_NON_STR_KEYS).decode()


class RequestPurpose(StrEnum):
    """Purpose of a request, if the API reports it."""

    TURN = "turn"
    """Turn of an agent."""
    COMPACTION = "compaction"
    """Summary of the agent's own history, which is trained and tagged."""


class ConstraintKind(StrEnum):
    """Form that a request demands of its answer."""

    CALL = "call"
    """At least one call, of any tool or of the named ones."""
    NAMED_CALL = "named_call"
    """One call of the named tool."""
    JSON_SCHEMA = "json_schema"
    """JSON that fits a schema, or calls if the request has tools."""
    JSON_OBJECT = "json_object"
    """A JSON object, or calls if the request has tools."""

    @property
    def forces_call(self) -> bool:
        return self in (ConstraintKind.CALL, ConstraintKind.NAMED_CALL)


@dataclass(frozen=True, slots=True)
class Constraint:
    """Demand on an answer. `names` are tools of the request, in order (none: any of them); `schema` is the text of a
    JSON schema; `field` is the field of the request, for error messages."""

    kind: ConstraintKind
    names: tuple[str, ...] = ()
    schema: str = ""
    field: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """Request of an agent. Budgets can only lower `max_tokens`; `stop` contains the stop strings, and with `keeps_stop`
    the one that ends the answer remains in its text; `agent` distinguishes the agents of one session if the API does
    ("" for the main one). With `calls_allowed` false, calls in the answer remain text. With `continues`, the last
    message is the policy's, has no calls and follows a message of another role: the policy continues it. Without
    `separates_reasoning`, the answer is one text as it was sampled, reasoning and call markup included. The agent's
    sampling parameters are omitted on purpose: the session's own parameters apply. `sampling` is a digest of them: who
    changes one wants another answer. `constraint` is the form that the answer must have, if any. `client` is the
    User-Agent of the program that sends the request; `keeps_order` says whether its API keeps the order of text and
    calls in a message."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    calls_allowed: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    keeps_stop: bool = False
    separates_reasoning: bool = True
    continues: bool = False
    model: str = ""
    agent: str = ""
    purpose: RequestPurpose = RequestPurpose.TURN
    sampling: str = ""
    client: str = ""
    keeps_order: bool = True
    constraint: Constraint | None = None

    @property
    def characters(self) -> int:
        """Total length of everything that is rendered: messages, calls with their arguments, results and tools."""
        return sum(message.characters for message in self.messages) + sum(tool.size for tool in self.tools)


class TurnEnd(StrEnum):
    """Reason why an answer ended, as reported to the agent."""

    STOP = "stop"
    """The policy ended its turn."""
    STOP_STRING = "stop_string"
    """One of the request's stop strings matched; it is in `TurnAnswer.stop_string`."""
    CALLS = "calls"
    """The policy ended its turn with tool calls."""
    LENGTH = "length"
    """A token, context or other budget ran out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAnswer:
    """Answer for the agent. `blocks` are Reasoning, Text and ToolCall in the order sampled. The dialects derive their
    ids and signatures from `turn_id` (letters, digits, `_`, `-`). Token counts are the numbers of ids that the engine
    received and sampled."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerTokens:
    """Tokens of an answer as they are in its row: the ids that the engine received, and those that it sampled, each
    with its log-probability (nats) and its bytes. A stop token that was sampled is one of them."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    logprobs: Sequence[float]
    pieces: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerWithTokens(TurnAnswer):
    """Answer to a request for its tokens. It is made when the answer is sent, and never kept. `tokens` is None if none
    of the answer was sampled."""

    tokens: AnswerTokens | None

    @classmethod
    def of(cls, answer: TurnAnswer, tokens: AnswerTokens | None) -> AnswerWithTokens:
        return cls(**{one.name: getattr(answer, one.name) for one in fields(answer)}, tokens=tokens)
