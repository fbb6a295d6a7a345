"""The matching of requests to recorded turns: digests of messages, and the echo of a sampled turn.

Invariants:
- Digests are stable across processes, so that a session can still be matched after the gateway is restarted.
- Reasoning is never compared: agents drop, shorten or summarise it, and the sampled reasoning remains in the tokens.
- One of our ids (tool call, signature) identifies its turn, whatever the words around it. Without such an id, the words
  are compared, first exactly, then ignoring whitespace, key order, defaults and types.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from typing import Any, Final

import orjson

from headrace.serve.conversation import (
    Block,
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    TurnRequest,
)

_CHANGE_OF_FOLDER: Final = re.compile(r"^\s*cd \S+ *&& *")
"""Command prefix that some agents drop if the command starts in that folder anyway."""


MAX_LEVELS: Final = 64
"""Nesting limit for arguments, which an agent may nest arbitrarily deep."""


class Drift(StrEnum):
    """Difference between an echo and the served turn."""

    NONE = ""
    """No difference."""
    TEXT = "text"
    """Different words or whitespace."""
    ARGUMENTS = "arguments"
    """Arguments of a call in a different form."""
    CALLS = "calls"
    """Calls missing, added or renamed."""
    ORDER = "order"
    """Text and calls in a different order."""


def digest(*parts: str | bytes) -> bytes:
    """Return a 16-byte digest; each part is delimited by its length."""
    hasher = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "little") + data)
    return hasher.digest()


def head_digest(tools: Sequence[ToolSpec], agent: str) -> bytes:
    """Return the digest of the part of a conversation that precedes its messages."""
    return digest("head", agent, *(tool.digest for tool in tools))


def options_digest(request: TurnRequest) -> str:
    """Return the digest of a request's other parameters, since agents that have run out of tokens repeat a request with
    a higher limit."""
    kept = " stop kept" if request.keeps_stop else ""
    kept += "" if request.separates_reasoning else " raw"
    kept += f" {request.sampling}" if request.sampling else ""
    return digest(str(request.max_tokens), f"{request.calls_allowed}{kept}", *request.stop).hex()


def message_parts(message: Message) -> tuple[bytes, ...]:
    """Return the digests of a message that was not sampled: one per tool result, none for an empty message."""
    if message.role is Role.TOOL:
        return tuple(result_digest(block) for block in message.blocks if isinstance(block, ToolResult))
    if message.role is Role.ASSISTANT:
        return (Served.of(message.blocks).exact,)
    # Agents add and drop whitespace around their own words.
    text = message.text.strip()
    return (digest(message.role, text),) if text else ()


def opened_part(text: str, *, resumes: bool) -> bytes:
    """Return the digest of the text that the agent wrote at the end of a prompt, for the policy to continue."""
    return digest("resumed" if resumes else "opened", text)


def result_digest(result: ToolResult) -> bytes:
    return RESULT + digest(result.call_id, result.text)


RESULT: Final = b"r"
"""First byte of a tool result's part, which has 17 bytes; other parts have 16."""


def is_result(part: bytes) -> bool:
    return len(part) == 17


class Frame:
    """Running digest of the parts other than tool results, which may be missing: sequences that `covers` treats as
    equal have the same frame."""

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
    """Return whether `given` repeats `known`: the same parts in the same order, except that tool results may be missing
    from `given`."""
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
    """Return the messages after a sampled turn in canonical form: among the leading messages, the turn's results come
    first, in the order of its calls and without duplicates (if they have ids)."""
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
    """Return the messages without further echoes of a turn: some agents repeat its parallel calls as several messages,
    each followed by its result. `call_ids` are the ids of the calls that the first message did not contain."""
    others: list[Message] = []
    for index, message in enumerate(messages):
        if message.role is not Role.ASSISTANT:
            others.append(message)
        elif not message.calls or any(call.id not in call_ids for call in message.calls):
            return (*others, *messages[index:])
    return tuple(others)


@dataclass(frozen=True, slots=True)
class Served:
    """Fingerprint of an answer, used to find its echo. It contains digests and call ids, but no text."""

    exact: bytes
    text: bytes
    arguments: bytes
    names: tuple[str, ...]
    call_ids: frozenset[str]

    @classmethod
    def of(cls, blocks: Iterable[Block]) -> Served:
        visible = [block for block in blocks if not isinstance(block, Reasoning)]
        text = "".join(block.text for block in visible if isinstance(block, Text))
        calls = [block for block in visible if isinstance(block, ToolCall)]
        kinds = (
            "c" if isinstance(block, ToolCall) else "t"
            for block in visible
            if not isinstance(block, Text) or block.text.strip()
        )
        # Agents that drop the reasoning between two texts join them.
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
        """Return the first difference between this answer and its echo."""
        if echo.exact == self.exact:
            return Drift.NONE
        if echo.call_ids != self.call_ids or echo.names != self.names:
            return Drift.CALLS
        if echo.arguments != self.arguments:
            return Drift.ARGUMENTS
        return Drift.TEXT if echo.text != self.text else Drift.ORDER


def plain_digest(blocks: Iterable[Block]) -> bytes:
    """Return a digest of an answer's words that ignores whitespace, ids, reasoning, and the order of text and calls."""
    answer = list(blocks)
    text = plain_text("".join(block.text for block in answer if isinstance(block, Text)))
    calls = (block for block in answer if isinstance(block, ToolCall))
    return digest(text, *(word for call in calls for word in (call.name, plain_arguments(call))))


def plain_text(text: str) -> str:
    """Return the text without whitespace, which agents trim and rewrap."""
    return "".join(text.split())


class _TooDeep(ValueError):
    """The value has more than `MAX_LEVELS` levels of nesting."""


def plain_arguments(call: ToolCall) -> bytes:
    """Return the arguments normalised so that whitespace, key order, defaults (false, null, empty) and types make no
    difference; return their text if it is not valid JSON or is nested too deeply."""
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
