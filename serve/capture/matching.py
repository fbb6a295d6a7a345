"""What is the same although it is spelled otherwise: digests of messages, and the echo of a sampled turn.

Invariants:
- Digests are stable over processes: a session is found again after a restart of the gateway.
- Reasoning never decides: agents drop, shorten or summarise it, and the sampled one stays in the tokens.
- An id of ours (tool call, signature) finds its turn whatever became of the words around it; without one the words
  decide, exactly first, then without blanks, order of keys, defaults and types.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import orjson

from headrace.serve.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from headrace.serve.conversation import Block, ToolSpec, TurnRequest

_CHANGE_OF_FOLDER: Final = re.compile(r"^\s*cd \S+ *&& *")
"""Some agents drop it from a command that starts in that folder already."""


MAX_LEVELS: Final = 64
"""Of nested arguments: anybody may write any number."""


class Drift(StrEnum):
    """How an echo differs from what was served."""

    NONE = ""
    """Not at all."""
    TEXT = "text"
    """Other words or blanks."""
    ARGUMENTS = "arguments"
    """Arguments of a call written otherwise."""
    CALLS = "calls"
    """Calls missing, added or renamed."""
    ORDER = "order"
    """Text and calls in another order."""


def digest(*parts: str | bytes) -> bytes:
    """16 bytes; the parts are delimited by their lengths."""
    hasher = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def head_digest(tools: Sequence[ToolSpec], agent: str) -> bytes:
    """What a conversation begins with besides its messages."""
    return digest("head", agent, *(tool.digest for tool in tools))


def wishes_of(request: TurnRequest) -> str:
    """What else than its messages makes a request the same as another; agents that run out of tokens ask again for
    more."""
    return digest(str(request.max_tokens), str(request.calls_allowed), *request.stop).hex()


def message_parts(message: Message) -> tuple[bytes, ...]:
    """Digests of a message that was not sampled; one for each result of a tool, none for an empty message."""
    if message.role is Role.TOOL:
        return tuple(result_digest(block) for block in message.blocks if isinstance(block, ToolResult))
    if message.role is Role.ASSISTANT:
        return (Served.of(message.blocks).exact,)
    # Agents add and drop blanks around their own words.
    text = message.text.strip()
    return (digest(message.role, text),) if text else ()


def result_digest(result: ToolResult) -> bytes:
    return RESULT + digest(result.call_id, result.text)


RESULT: Final = b"r"
"""Begins the part of a tool result; other parts are 16 bytes, this one 17."""


def is_result(part: bytes) -> bool:
    return len(part) == 17


class Frame:
    """A running digest of parts without those that may be missing: what `covers` has the same frame."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._hasher = blake2b(digest_size=16)
        self.add(parts)

    def add(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            if not is_result(part):
                self._hasher.update(part)

    def digest(self) -> bytes:
        return self._hasher.digest()


def covers(known: Sequence[bytes], given: Sequence[bytes]) -> bool:
    """Whether `given` is what was rendered as `known`: the same parts in order, but that results may be missing."""
    if len(known) == len(given):
        return tuple(known) == tuple(given)
    missing = iter(known)
    for part in given:
        for candidate in missing:
            if candidate == part:
                break
            if not is_result(candidate):
                return False
        else:
            return False
    return all(is_result(part) for part in missing)


def in_order_of(calls: Sequence[ToolCall], messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages after a sampled turn in their one form: its results first among the leading ones, in the order of
    its calls, and none twice (where ids tell them apart)."""
    leading = 0
    while leading < len(messages) and messages[leading].role is Role.TOOL:
        leading += 1
    if not leading:
        return tuple(messages)
    given = [block for message in messages[:leading] for block in message.blocks if isinstance(block, ToolResult)]
    rank = {call.id: index for index, call in enumerate(calls)}
    once = {(result, index if not result.call_id else 0): result for index, result in enumerate(given)}
    results = sorted(once.values(), key=lambda result: rank.get(result.call_id, len(rank)))
    return (Message(Role.TOOL, tuple(results)), *messages[leading:])


def without_echoes_of(call_ids: Collection[str], messages: Sequence[Message]) -> tuple[Message, ...]:
    """Some agents echo the parallel calls of one turn as several messages, each with its result after it. `call_ids`
    are those that its first message did not show."""
    kept: list[Message] = []
    for index, message in enumerate(messages):
        if message.role is not Role.ASSISTANT:
            kept.append(message)
        elif not _belongs(message, call_ids):
            return (*kept, *messages[index:])
    return tuple(kept)


def _belongs(message: Message, call_ids: Collection[str]) -> bool:
    calls = message.calls
    return bool(calls) and all(call.id in call_ids for call in calls)


@dataclass(frozen=True, slots=True)
class Served:
    """What is kept of an answer to find its echo: digests and call ids, no words."""

    exact: bytes
    text: bytes
    arguments: bytes
    names: tuple[str, ...]
    call_ids: frozenset[str]

    @classmethod
    def of(cls, blocks: Iterable[Block]) -> Served:
        said = [block for block in blocks if not isinstance(block, Reasoning)]
        text = "".join(block.text for block in said if isinstance(block, Text))
        calls = [block for block in said if isinstance(block, ToolCall)]
        kinds = ("c" if isinstance(block, ToolCall) else "t" for block in said if not _is_blank(block))
        # Texts that reasoning stood between are one for those who drop it.
        order = re.sub("t+", "t", "".join(kinds))
        call_words = [word for call in calls for word in (call.id, call.name, call.arguments)]
        return cls(
            exact=digest("assistant", order, text, *call_words),
            text=digest(text),
            arguments=digest(*(call.arguments for call in calls)),
            names=tuple(call.name for call in calls),
            call_ids=frozenset(call.id for call in calls),
        )

    def drift_to(self, echo: Served) -> Drift:
        """The first way in which an echo of this differs."""
        if echo.exact == self.exact:
            return Drift.NONE
        if echo.call_ids != self.call_ids or echo.names != self.names:
            return Drift.CALLS
        if echo.arguments != self.arguments:
            return Drift.ARGUMENTS
        return Drift.TEXT if echo.text != self.text else Drift.ORDER


def plain_digest(blocks: Iterable[Block]) -> bytes:
    """Of the words of an answer alone: without blanks, ids, reasoning, and the order of text and calls."""
    said = list(blocks)
    text = plain_text("".join(block.text for block in said if isinstance(block, Text)))
    calls = (block for block in said if isinstance(block, ToolCall))
    return digest(text, *(word for call in calls for word in (call.name, plain_arguments(call))))


def _is_blank(block: Block) -> bool:
    return isinstance(block, Text) and not block.text.strip()


def plain_text(text: str) -> str:
    """Without blanks, which agents trim and re-flow."""
    return "".join(text.split())


class _TooDeep(ValueError):
    """More than `MAX_LEVELS` of nesting."""


def plain_arguments(call: ToolCall) -> bytes:
    """Arguments without blanks, order of keys, defaults (false, null, empty) and types; their text where it is no
    JSON, or too deep."""
    try:
        plain = _plain(orjson.loads(call.arguments), MAX_LEVELS)
    except (orjson.JSONDecodeError, _TooDeep):
        return plain_text(call.arguments).encode("utf-8", "surrogatepass")
    return orjson.dumps(plain, option=orjson.OPT_SORT_KEYS)


def _plain(value: Any, levels: int) -> Any:
    if not levels:
        raise _TooDeep
    if isinstance(value, dict):
        entries = ((key, _plain(entry, levels - 1)) for key, entry in value.items())
        return {key: plain for key, plain in entries if plain not in ("", "false", None)}
    if isinstance(value, list):
        return [_plain(entry, levels - 1) for entry in value]
    if isinstance(value, str):
        return plain_text(_CHANGE_OF_FOLDER.sub("", value))
    return None if value is None else orjson.dumps(value).decode()
