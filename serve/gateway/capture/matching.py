"""The matching of requests to recorded turns: digests of what agents say themselves, and the canonical form of their
messages. What they repeat of the policy's words is in echoes.py.

Invariants:
- Digests are stable across processes, so that a session can still be matched after the gateway is restarted.
- A prompt is known only by exactly its messages: a result that a request does not contain is never part of its prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

from headrace.serve.gateway.capture.echoes import Words, digest
from headrace.serve.gateway.conversation import Message, Role, ToolCall, ToolResult, ToolSpec, TurnRequest


def head_digest(tools: Sequence[ToolSpec], agent: str) -> bytes:
    """Return the digest of the part of a conversation that precedes its messages."""
    return digest("head", agent, *(tool.digest for tool in tools))


def options_digest(request: TurnRequest) -> str:
    """Return the digest of a request's other parameters, since agents that have run out of tokens repeat a request with
    a higher limit."""
    kept = " stop kept" if request.keeps_stop else ""
    kept += "" if request.separates_reasoning else " raw"
    kept += f" {request.sampling}" if request.sampling else ""
    if (form := request.constraint) is not None:
        kept += f" {form.kind} {form.names} {form.schema}"
    return digest(str(request.max_tokens), f"{request.calls_allowed}{kept}", *request.stop).hex()


def message_parts(message: Message) -> tuple[bytes, ...]:
    """Return the digests of a message that was not sampled: one per tool result, none for an empty message."""
    if message.role is Role.TOOL:
        results = (block for block in message.blocks if isinstance(block, ToolResult))
        return tuple(b"r" + digest(result.call_id, result.text) for result in results)
    if message.role is Role.ASSISTANT:
        return (Words(message.blocks).exact,)
    # Agents add and drop whitespace around their own words.
    text = message.text.strip()
    return (digest(message.role, text),) if text else ()


def opened_part(text: str, *, resumes: bool) -> bytes:
    """Return the digest of the text that the agent wrote at the end of a prompt, for the policy to continue."""
    return digest("resumed" if resumes else "opened", text)


class PartsDigest:
    """Running digest of the parts of a conversation."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._hasher = blake2b(digest_size=16)
        self.add(parts)

    def add(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            self._hasher.update(part)

    def digest(self) -> bytes:
        return self._hasher.digest()


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


def split_echo(call_ids: Collection[str], messages: Sequence[Message]) -> tuple[Message, tuple[Message, ...]]:
    """Return the first message together with further echoes of its turn, whose calls have these ids, and the other
    messages: some agents repeat the parallel calls of a turn as several messages, each followed by its result."""
    first, rest = messages[0], messages[1:]
    blocks, others = list(first.blocks), list[Message]()
    for index, message in enumerate(rest):
        if message.role is not Role.ASSISTANT:
            others.append(message)
        elif not message.calls or any(call.id not in call_ids for call in message.calls):
            others += rest[index:]
            break
        else:
            # Some repeat the text with each call.
            blocks += message.calls if message.text == first.text else message.blocks
    return Message(Role.ASSISTANT, tuple(blocks)), tuple(others)
