"""The dialect of Anthropic's Messages API: `POST /v1/messages` and `/v1/messages/count_tokens`.

Invariants:
- System messages keep their positions. Claude Code's billing line, which changes within a session, is removed from
  them.
- The `signature` of a thinking block is the turn's id, and agents echo it unchanged.
- A tool call whose arguments are not a JSON object is written in the form that Claude Code itself uses for unreadable
  arguments, so that the raw text survives the round trip.
- `usage.input_tokens` counts the whole prompt; no tokens are reported as cached, because clients add the two numbers
  up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from headrace.serve.gateway.conversation import (
    Block,
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    TurnAnswer,
    TurnEnd,
    TurnRequest,
    say,
)
from headrace.serve.gateway.dialects import constraints, fields, openai
from headrace.serve.gateway.dialects.dialect import WireRequest
from headrace.serve.gateway.dialects.fields import JsonObject
from headrace.serve.gateway.errors import BadRequest, ContextExceeded, GatewayBroken, InfraError, WireError

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
_ERROR_TYPES = {
    401: "authentication_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    OVERLOADED: "overloaded_error",
}


class AnthropicMessages:
    """Dialect of `POST /v1/messages`."""

    @property
    def ping(self) -> bytes:
        return openai.event({"type": "ping"})

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        return _parse(body, headers, prefill=False)

    def parse_count(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        """Parse the body of a `count_tokens` request, in which the last message may be the assistant's."""
        return _parse(body, headers, prefill=True)

    def count(self, prompt_tokens: int) -> dict[str, object]:
        """Return the response to `count_tokens`."""
        return {"input_tokens": prompt_tokens}

    def answer(
        self, request: WireRequest, turn: TurnAnswer, *, created_s: int, others: Sequence[TurnAnswer] = ()
    ) -> dict[str, object]:
        content: list[dict[str, object]] = []
        for block in turn.blocks:
            if isinstance(block, Reasoning):
                content.append({"type": "thinking", "thinking": block.text, "signature": turn.turn_id})
            elif isinstance(block, ToolCall):
                arguments = _input(block.arguments)
                content.append({"type": "tool_use", "id": block.id, "name": block.name, "input": arguments})
            else:
                content.append({"type": "text", "text": block.text})
        return _message(request, turn) | {
            "content": content,
            "stop_reason": _STOP_REASONS[turn.end],
            "stop_sequence": turn.stop_string or None,
            "usage": _usage(turn.prompt_tokens, turn.completion_tokens),
        }

    def stream(
        self, request: WireRequest, turn: TurnAnswer, *, created_s: int, others: Sequence[TurnAnswer] = ()
    ) -> bytes:
        parts = [openai.event({"type": "message_start", "message": _message(request, turn)})]
        for index, block in enumerate(turn.blocks):
            start: dict[str, object] = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": getattr(block, "text", "")}]
            if isinstance(block, Reasoning):
                start = {"type": "thinking", "thinking": "", "signature": ""}
                deltas = [
                    {"type": "thinking_delta", "thinking": block.text},
                    {"type": "signature_delta", "signature": turn.turn_id},
                ]
            elif isinstance(block, ToolCall):
                start = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": block.arguments}]
            parts.append(openai.event({"type": "content_block_start", "index": index, "content_block": start}))
            parts += [openai.event({"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas]
            parts.append(openai.event({"type": "content_block_stop", "index": index}))
        delta = {"stop_reason": _STOP_REASONS[turn.end], "stop_sequence": turn.stop_string or None}
        usage = _usage(turn.prompt_tokens, turn.completion_tokens)
        parts.append(openai.event({"type": "message_delta", "delta": delta, "usage": usage}))
        parts.append(openai.event({"type": "message_stop"}))
        return b"".join(parts)

    def status(self, failure: WireError) -> int:
        # Clients retry 503 and 401 for minutes; they retry 529 too, but it says that the condition is temporary.
        if isinstance(failure, InfraError) and not isinstance(failure, GatewayBroken):
            return OVERLOADED
        return failure.status

    def error(self, failure: WireError) -> dict[str, object]:
        kind = _ERROR_TYPES.get(self.status(failure), "invalid_request_error")
        message = failure.public_message
        if isinstance(failure, ContextExceeded):
            # Claude Code compacts its history when it reads exactly this text, and gives up at any other wording.
            tokens = max(failure.tokens or 0, failure.limit + 1)
            message = f"prompt is too long: {tokens} tokens > {failure.limit} maximum"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def refuses_in_stream(self, failure: WireError) -> bool:
        return False

    def stream_error(self, request: WireRequest, failure: WireError) -> bytes:
        return openai.event(self.error(failure))

    def models(self, created_s: int) -> dict[str, object]:
        name = fields.DEFAULT_MODEL
        return {"data": [self.model(name, created_s)], "has_more": False, "first_id": name, "last_id": name}

    def model(self, name: str, created_s: int) -> dict[str, object]:
        created_at = datetime.fromtimestamp(created_s, UTC).isoformat()
        return {"type": "model", "id": name, "display_name": name, "created_at": created_at}


def _parse(body: bytes, headers: Mapping[str, str], *, prefill: bool) -> WireRequest:
    document = fields.read_request(body, "messages")
    model, tools = fields.string(document, "model"), _KNOWN_TOOLS.of(document.get("tools"))
    choice = constraints.anthropic_choice(document.get("tool_choice"), tools)
    form = constraints.text_format(document.get("output_format"), "output_format")
    if (config := document.get("output_config")) is not None:
        given = fields.as_object(config, "output_config").get("format")
        form = constraints.text_format(given, "output_config.format") or form
    turn = TurnRequest(
        messages=fields.checked(_conversation(document), "messages", prefill=prefill),
        tools=tools,
        calls_allowed=choice.allowed,
        constraint=choice.forced or form,
        max_tokens=fields.max_tokens(document, "max_tokens"),
        stop=fields.stop_strings(document, "stop_sequences"),
        model=model,
        sampling=fields.sampling_digest(document),
        client=fields.client(headers),
        agent=fields.header(headers, AGENT_HEADER)[: fields.MAX_AGENT_CHARACTERS],
    )
    return WireRequest(turn=turn, stream=fields.boolean(document, "stream"), model=model or fields.DEFAULT_MODEL)


def _conversation(document: JsonObject) -> Iterator[Message]:
    entries = fields.as_list(document.get("messages"), "messages")
    if not entries:
        raise BadRequest("messages must contain at least one message.", "messages")
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
    """Return the blocks as one string, without Claude Code's billing line."""
    texts = (
        _BILLING_LINE.sub("", block.text) if "x-anthropic-billing-header:" in block.text else block.text
        for block in fields.texts(content, where)
    )
    return "\n\n".join(filter(None, texts))


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
            given = block.get("input")
            unparsed = given.get(UNPARSED) if isinstance(given, dict) and len(given) == 1 else None
            if isinstance(unparsed, dict) and isinstance(unparsed.get("raw"), str):
                arguments = str(unparsed["raw"])
            else:
                arguments = "{}" if given is None else fields.json_text(given, f"{path}.input")
            yield ToolCall(fields.string(block, "id", path), fields.string(block, "name", path), arguments)
        elif kind == "thinking":
            yield Reasoning(fields.string(block, "thinking", path), fields.string(block, "signature", path))
        elif kind == "redacted_thinking":
            yield Reasoning("", fields.string(block, "data", path))
        elif text := fields.part_text(block, path):
            yield Text(text)


def _tools(value: object) -> tuple[ToolSpec, ...]:
    specs = []
    for index, entry in enumerate(fields.as_list(value, "tools")):
        where = f"tools[{index}]"
        tool = fields.as_object(entry, where)
        kind = fields.string(tool, "type", where)
        if kind in ("", "custom") or "input_schema" in tool:
            schema = fields.tool_parameters(tool.get("input_schema"), f"{where}.input_schema")
            specs.append(ToolSpec(fields.tool_name(tool, where), fields.string(tool, "description", where), schema))
        elif kind.startswith("bash_"):
            specs.append(ToolSpec(fields.tool_name(tool, where), "Runs a command in a shell that stays open.", _BASH))
        elif kind.startswith("text_editor_"):
            # ISO dates compare as text.
            editor = _TEXT_EDITOR if kind.removeprefix("text_editor_") >= "20250429" else _OLD_TEXT_EDITOR
            specs.append(ToolSpec(fields.tool_name(tool, where), "Views, creates and edits text files.", editor))
    return tuple(specs)


_KNOWN_TOOLS = fields.KnownTools(_tools)


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
    """Return the message as it is before anything has been sampled."""
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


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments as an object, which this dialect requires."""
    try:
        value = orjson.loads(arguments or "{}")
        fields.as_object(value, "input")
        fields.check_depth(value, "input")
    except (orjson.JSONDecodeError, BadRequest):
        return {UNPARSED: {"raw": arguments, "len": len(arguments)}}
    return dict(value)
