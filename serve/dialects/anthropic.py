"""Anthropic's Messages API, both ways: `POST /v1/messages` and `/v1/messages/count_tokens`.

Invariants:
- System messages stay where they stand. Claude Code's billing line, which changes within a session, is dropped from
  them.
- `signature` of a thinking block is the turn's id, and comes back as such.
- A tool call whose arguments are no JSON object goes out and comes back as Claude Code itself spells one that it
  cannot read, so that the raw text survives the round.
- `usage.input_tokens` counts the whole prompt; nothing is reported as cached, because clients add the two up.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

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
    TurnEnd,
    TurnRequest,
    say,
)
from headrace.serve.dialects import events, fields
from headrace.serve.dialects.dialect import WireRequest
from headrace.serve.errors import BadRequest, ContextExceeded, GatewayBroken, InfraError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from headrace.serve.conversation import TurnAnswer
    from headrace.serve.dialects.fields import JsonObject
    from headrace.serve.errors import WireError

AGENT_HEADER = "x-claude-code-agent-id"
OVERLOADED = 529
UNPARSED = "__unparsedToolInput"

_ROLES = ("assistant", "system", "user")
_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:[^\n]*\n*", re.MULTILINE)
_STOP_REASONS = {
    TurnEnd.STOP: "end_turn",
    TurnEnd.STOP_STRING: "stop_sequence",
    TurnEnd.CALLS: "tool_use",
    TurnEnd.LENGTH: "max_tokens",
}
_ERROR_TYPES = {401: "authentication_error", 413: "request_too_large", 500: "api_error", OVERLOADED: "overloaded_error"}


class AnthropicMessages:
    """`POST /v1/messages`."""

    @property
    def ping(self) -> bytes:
        return events.event({"type": "ping"})

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        return _parse(body, headers, prefill=False)

    def parse_count(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        """The body of `count_tokens`: as for a turn, but the last message may be the assistant's."""
        return _parse(body, headers, prefill=True)

    def count(self, prompt_tokens: int) -> dict[str, object]:
        """The answer of `count_tokens`."""
        return {"input_tokens": prompt_tokens}

    def answer(self, request: WireRequest, turn: TurnAnswer, *, created_s: int) -> dict[str, object]:
        return _message(request, turn) | {
            "content": [_finished(block, turn.turn_id) for block in turn.blocks],
            "stop_reason": _STOP_REASONS[turn.end],
            "stop_sequence": turn.stop_string or None,
            "usage": _usage(turn.prompt_tokens, turn.completion_tokens),
        }

    def stream(self, request: WireRequest, turn: TurnAnswer, *, created_s: int) -> bytes:
        parts = [events.event({"type": "message_start", "message": _message(request, turn)})]
        for index, block in enumerate(turn.blocks):
            parts += _streamed(block, index, turn.turn_id)
        delta = {"stop_reason": _STOP_REASONS[turn.end], "stop_sequence": turn.stop_string or None}
        usage = _usage(turn.prompt_tokens, turn.completion_tokens)
        parts.append(events.event({"type": "message_delta", "delta": delta, "usage": usage}))
        parts.append(events.event({"type": "message_stop"}))
        return b"".join(parts)

    def status(self, failure: WireError) -> int:
        # 503 and 401 would be tried again for minutes; 529 is tried again as well, but says that it will pass.
        if isinstance(failure, InfraError) and not isinstance(failure, GatewayBroken):
            return OVERLOADED
        return failure.status

    def error(self, failure: WireError) -> dict[str, object]:
        kind = _ERROR_TYPES.get(self.status(failure), "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": _sentence(failure)}}

    def refuses_in_stream(self, failure: WireError) -> bool:
        return False

    def stream_error(self, request: WireRequest, failure: WireError) -> bytes:
        return events.event(self.error(failure))

    def models(self, created_s: int) -> dict[str, object]:
        name = fields.DEFAULT_MODEL
        created_at = datetime.fromtimestamp(created_s, UTC).isoformat()
        model = {"type": "model", "id": name, "display_name": name, "created_at": created_at}
        return {"data": [model], "has_more": False, "first_id": name, "last_id": name}


def _parse(body: bytes, headers: Mapping[str, str], *, prefill: bool) -> WireRequest:
    document = fields.read_body(body)
    model = fields.string(document, "model")
    turn = TurnRequest(
        messages=fields.checked(_conversation(document), "messages", prefill=prefill),
        tools=_KNOWN_TOOLS.of(document.get("tools")),
        calls_allowed=_calls_allowed(document.get("tool_choice")),
        max_tokens=fields.max_tokens(document, "max_tokens"),
        stop=fields.stop_strings(document, "stop_sequences"),
        model=model,
        agent=fields.header(headers, AGENT_HEADER)[: fields.MAX_AGENT_CHARACTERS],
    )
    return WireRequest(turn=turn, stream=fields.boolean(document, "stream"), model=model or fields.DEFAULT_MODEL)


def _conversation(document: JsonObject) -> Iterator[Message]:
    entries = fields.as_list(document.get("messages"), "messages")
    if not entries:
        raise BadRequest("messages must hold at least one message.", "messages")
    if text := _system_text(document.get("system"), "system"):
        yield say(Role.SYSTEM, text)
    for index, entry in enumerate(entries):
        where = f"messages[{index}]"
        message = fields.as_object(entry, where)
        role, content = message.get("role"), message.get("content")
        if role == "user":
            yield from _user(content, f"{where}.content")
        elif role == "assistant":
            yield Message(Role.ASSISTANT, tuple(_assistant(content, f"{where}.content")))
        elif role == "system":
            if text := _system_text(content, f"{where}.content"):
                yield say(Role.SYSTEM, text)
        else:
            raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", f"{where}.role")


def _system_text(content: object, where: str) -> str:
    """Its blocks as one text, without what the client counts and signs its requests with."""
    kept = []
    for block in fields.texts(content, where):
        text = _BILLING_LINE.sub("", block.text) if "x-anthropic-billing-header:" in block.text else block.text
        if text:
            kept.append(text)
    return "\n\n".join(kept)


def _user(content: object, where: str) -> Iterator[Message]:
    if not isinstance(content, list):
        yield Message(Role.USER, fields.texts(content, where))
        return
    results: list[Block] = []
    texts: list[Block] = []
    for index, entry in enumerate(content):
        path = f"{where}[{index}]"
        block = fields.as_object(entry, path)
        if block.get("type") == "tool_result":
            text = fields.result_text(block.get("content"), f"{path}.content")
            results.append(ToolResult(fields.string(block, "tool_use_id", path), text))
        elif text := fields.part_text(block, path):
            texts.append(Text(text))
    if results:
        yield Message(Role.TOOL, tuple(results))
    if texts or not results:
        yield Message(Role.USER, tuple(texts))


def _assistant(content: object, where: str) -> Iterator[Block]:
    if not isinstance(content, list):
        yield from fields.texts(content, where)
        return
    for index, entry in enumerate(content):
        path = f"{where}[{index}]"
        block = fields.as_object(entry, path)
        kind = block.get("type")
        if kind == "tool_use":
            arguments = _arguments(block.get("input"), f"{path}.input")
            yield ToolCall(fields.string(block, "id", path), fields.string(block, "name", path), arguments)
        elif kind == "thinking":
            yield Reasoning(fields.string(block, "thinking", path), fields.string(block, "signature", path))
        elif kind == "redacted_thinking":
            yield Reasoning("", fields.string(block, "data", path))
        elif text := fields.part_text(block, path):
            yield Text(text)


def _arguments(value: object, where: str) -> str:
    if value is None:
        return "{}"
    if isinstance(value, dict) and len(value) == 1:
        unparsed = value.get(UNPARSED)
        if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
            return str(unparsed["raw"])
    return fields.json_text(value, where)


def _calls_allowed(value: object) -> bool:
    choice = None if value is None else fields.as_object(value, "tool_choice").get("type")
    return fields.calls_allowed(choice, none="none", auto="auto")


def _tools(value: object) -> Iterator[ToolSpec]:
    for index, entry in enumerate(fields.as_list(value, "tools")):
        where = f"tools[{index}]"
        tool = fields.as_object(entry, where)
        kind = fields.string(tool, "type", where)
        if kind in ("", "custom") or "input_schema" in tool:
            schema = fields.tool_parameters(tool.get("input_schema"), f"{where}.input_schema")
            yield ToolSpec(fields.tool_name(tool, where), fields.string(tool, "description", where), schema)
        elif kind.startswith("bash_"):
            yield ToolSpec(fields.tool_name(tool, where), "Runs a command in a shell that stays open.", _BASH)
        elif kind.startswith("text_editor_"):
            # Dates in ISO order compare as text.
            newer = kind.removeprefix("text_editor_") >= "20250429"
            description = "Views, creates and edits text files."
            yield ToolSpec(fields.tool_name(tool, where), description, _TEXT_EDITOR if newer else _OLD_TEXT_EDITOR)


_KNOWN_TOOLS = fields.KnownTools(lambda value: tuple(_tools(value)))


def _properties(**types: str) -> JsonObject:
    return {name: {"type": kind} for name, kind in types.items()}


def _text_editor(commands: list[str], inserted: str) -> JsonObject:
    properties = _properties(
        path="string", file_text="string", old_str="string", new_str="string", insert_line="integer"
    ) | {inserted: {"type": "string"}, "view_range": {"type": "array", "items": {"type": "integer"}}}
    return {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": commands}} | properties,
        "required": ["command", "path"],
    }


_BASH: JsonObject = {"type": "object", "properties": _properties(command="string", restart="boolean")}
_TEXT_EDITOR = _text_editor(["view", "create", "str_replace", "insert"], "insert_text")
_OLD_TEXT_EDITOR = _text_editor(["view", "create", "str_replace", "insert", "undo_edit"], "new_str")


def _message(request: WireRequest, turn: TurnAnswer) -> dict[str, object]:
    """The message before anything was sampled."""
    return {
        "id": f"msg_{turn.turn_id}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(turn.prompt_tokens, 0),
    }


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    return {
        "input_tokens": prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": completion_tokens,
    }


def _finished(block: Block, turn_id: str) -> dict[str, object]:
    if isinstance(block, Reasoning):
        return {"type": "thinking", "thinking": block.text, "signature": turn_id}
    if isinstance(block, ToolCall):
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": _input(block.arguments)}
    return {"type": "text", "text": block.text}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that this wire demands."""
    try:
        value = orjson.loads(arguments or "{}")
        fields.as_object(value, "input")
        fields.check_depth(value, "input")
    except (orjson.JSONDecodeError, BadRequest):
        return {UNPARSED: {"raw": arguments, "len": len(arguments)}}
    return dict(value)


def _streamed(block: Block, index: int, turn_id: str) -> list[bytes]:
    start: dict[str, object]
    if isinstance(block, Reasoning):
        start = {"type": "thinking", "thinking": "", "signature": ""}
        deltas = [{"type": "thinking_delta", "thinking": block.text}, {"type": "signature_delta", "signature": turn_id}]
    elif isinstance(block, ToolCall):
        start = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        deltas = [{"type": "input_json_delta", "partial_json": block.arguments}]
    else:
        start = {"type": "text", "text": ""}
        deltas = [{"type": "text_delta", "text": block.text}]
    return [
        events.event({"type": "content_block_start", "index": index, "content_block": start}),
        *(events.event({"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas),
        events.event({"type": "content_block_stop", "index": index}),
    ]


def _sentence(failure: WireError) -> str:
    """Claude Code compacts its history when it reads exactly this, and gives up at any other wording."""
    if isinstance(failure, ContextExceeded):
        tokens = max(failure.tokens or 0, failure.limit + 1)
        return f"prompt is too long: {tokens} tokens > {failure.limit} maximum"
    return failure.told
