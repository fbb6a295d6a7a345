"""OpenAI's Responses, both ways: `POST /v1/responses`, streamed and not.

Invariants:
- Consecutive items of the assistant are one message; where their marks tell two sampled turns apart, two.
- The turn's id comes back by `encrypted_content` of a reasoning item, or by the ids of our items
  (`msg_<turn id>.<number>`), which agents echo as well; ids of others leave no trace.
- A tool inside a `namespace` is called `<namespace>__<name>` by the policy, and goes out as Codex wants it: name and
  namespace apart. A `custom` tool has the one argument `input`.
- Nothing is stored here: what refers to an earlier response is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from headrace.serve.conversation import (
    Block,
    Message,
    Purpose,
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
from headrace.serve.dialects import events, fields, openai
from headrace.serve.dialects.dialect import CallShape, WireRequest
from headrace.serve.errors import BadRequest, BodyTooLarge, ContextExceeded, InfraError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from headrace.serve.conversation import TurnAnswer
    from headrace.serve.dialects.fields import JsonObject
    from headrace.serve.errors import WireError

METADATA = "x-codex-turn-metadata"
SUBAGENT = "x-openai-subagent"
COMPACTING_SUBAGENT = "compact"
"""Older Codex marks a compaction so; newer ones say `request_kind`."""

_ROLES = {
    "assistant": Role.ASSISTANT,
    "developer": Role.SYSTEM,
    "system": Role.SYSTEM,
    "user": Role.USER,
}
# A dot stands in no turn id, and in no id of another provider.
_OUR_ID = re.compile(r"(?:rs|msg|fc|ctc)_([A-Za-z0-9_-]+)\.[0-9]+")
_FREEFORM_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_GROWING = ("arguments", "content", "input", "summary")
"""Fields of an item that are empty when it is announced."""
_STORED = {
    "previous_response_id": "previous_response_id: responses are not stored here; send the whole conversation.",
    "conversation": "conversation: conversations are not stored here; send the whole conversation as input.",
    "background": "background: responses are not stored here; wait for the answer, or stream it.",
}


class Responses:
    """`POST /v1/responses`."""

    @property
    def ping(self) -> bytes:
        # Codex ends a stream without an event for 300 s, and comments are none to it. This one is OpenAI's own.
        return events.event({"type": "keepalive", "sequence_number": 0})

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        document = fields.read_body(body)
        for name, sentence in _STORED.items():
            if document.get(name):
                raise BadRequest(sentence, name)
        model = fields.string(document, "model")
        tools, shapes = _KNOWN_TOOLS.of(document.get("tools"))
        agent, purpose = _codex(document, headers)
        turn = TurnRequest(
            messages=fields.checked(_conversation(document), "input"),
            tools=tools,
            calls_allowed=fields.calls_allowed(document.get("tool_choice"), none="none", auto="auto"),
            max_tokens=fields.max_tokens(document, "max_output_tokens"),
            model=model,
            agent=agent,
            purpose=purpose,
        )
        stream = fields.boolean(document, "stream")
        return WireRequest(turn=turn, stream=stream, model=model or fields.DEFAULT_MODEL, call_shapes=shapes)

    def answer(self, request: WireRequest, turn: TurnAnswer, *, created_s: int) -> dict[str, object]:
        items = [_item(request, turn, index) for index in range(len(turn.blocks))]
        return _finished(request, turn, created_s, items)

    def stream(self, request: WireRequest, turn: TurnAnswer, *, created_s: int) -> bytes:
        writer = _EventWriter()
        opened = _response(request, f"resp_{turn.turn_id}", created_s)
        writer.write("response.created", response=opened)
        writer.write("response.in_progress", response=opened)
        items = [_item(request, turn, index) for index in range(len(turn.blocks))]
        for index, item in enumerate(items):
            _write_item(writer, index, item)
        kind = "response.incomplete" if turn.end is TurnEnd.LENGTH else "response.completed"
        writer.write(kind, response=_finished(request, turn, created_s, items))
        return b"".join(writer.parts)

    def status(self, failure: WireError) -> int:
        # Codex tries 413 again five times.
        return 400 if isinstance(failure, BodyTooLarge) else openai.status(failure)

    def error(self, failure: WireError) -> dict[str, object]:
        return openai.error(failure)

    def refuses_in_stream(self, failure: WireError) -> bool:
        # Of Codex's releases only the newer ones know it by the status 400 too.
        return isinstance(failure, ContextExceeded)

    def stream_error(self, request: WireRequest, failure: WireError) -> bytes:
        writer = _EventWriter()
        response = _response(request, "resp_failed", 0)
        writer.write("response.created", response=response)
        error = {"code": _stream_code(failure), "message": openai.sentence(failure)}
        writer.write("response.failed", response=response | {"status": "failed", "error": error})
        return b"".join(writer.parts)

    def models(self, created_s: int) -> dict[str, object]:
        return openai.models(created_s)


def _stream_code(failure: WireError) -> str:
    """Codex tries again at `server_error` and stops at the others."""
    if isinstance(failure, ContextExceeded):
        return failure.code
    return "server_error" if isinstance(failure, InfraError) else "invalid_prompt"


def _codex(document: JsonObject, headers: Mapping[str, str]) -> tuple[str, Purpose]:
    """Which of Codex's threads asks ("" for the main one), and what for."""
    client = _inner(document.get("client_metadata"))
    metadata = _inner(fields.header(headers, METADATA) or client.get(METADATA))
    label = fields.header(headers, SUBAGENT) or _word(client, SUBAGENT)
    compacts = metadata.get("request_kind") == Purpose.COMPACTION.value or label == COMPACTING_SUBAGENT
    child = metadata.get("thread_source") == "subagent" or metadata.get("parent_thread_id")
    agent = ""
    if child or label not in ("", COMPACTING_SUBAGENT):
        agent = _word(metadata, "thread_id") or fields.header(headers, "thread-id") or label
    return agent[: fields.MAX_AGENT_CHARACTERS], Purpose.COMPACTION if compacts else Purpose.TURN


def _inner(value: object) -> JsonObject:
    """An object, or the text of one; whatever else is an empty one."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            return {}
    return value if isinstance(value, dict) else {}


def _word(document: JsonObject, name: str) -> str:
    value = document.get(name)
    return value if isinstance(value, str) else ""


def _flat_name(namespace: str, name: str) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _tools(value: object) -> tuple[tuple[ToolSpec, ...], dict[str, CallShape]]:
    """The tools the policy is offered, and those of them whose calls are no plain functions on the wire."""
    specs: list[ToolSpec] = []
    shapes: dict[str, CallShape] = {}
    for namespace, tool, where in _flat_tools(value):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            continue
        name = fields.tool_name(tool, where)
        flat = _flat_name(namespace, name)
        description = fields.string(tool, "description", where)
        if kind == "custom":
            description = "\n\n".join(filter(None, (description, _grammar(tool.get("format")))))
            parameters = _FREEFORM_PARAMETERS
        else:
            parameters = fields.tool_parameters(tool.get("parameters"), f"{where}.parameters")
        specs.append(ToolSpec(flat, description, parameters))
        if namespace or kind == "custom":
            shapes[flat] = CallShape(name=name, namespace=namespace, freeform=kind == "custom")
    return tuple(specs), shapes


_KNOWN_TOOLS = fields.KnownTools(_tools)


def _flat_tools(value: object) -> Iterator[tuple[str, JsonObject, str]]:
    """Namespace, tool, path."""
    for index, entry in enumerate(fields.as_list(value, "tools")):
        where = f"tools[{index}]"
        tool = fields.as_object(entry, where)
        if tool.get("type") != "namespace":
            yield "", tool, where
            continue
        namespace = fields.tool_name(tool, where)
        for inner, member in enumerate(fields.as_list(tool.get("tools"), f"{where}.tools")):
            path = f"{where}.tools[{inner}]"
            yield namespace, fields.as_object(member, path), path


def _grammar(form: object) -> str:
    """What the policy must know of a free form, in words."""
    if not isinstance(form, dict) or not isinstance(form.get("definition"), str):
        return ""
    return f"The input follows this grammar ({form.get('syntax')}):\n{form['definition']}"


def _conversation(document: JsonObject) -> Iterator[Message]:
    """All system messages before the first other one become one, after `instructions`."""
    value = document.get("input")
    messages: Iterable[Message] = (say(Role.USER, value),) if value and isinstance(value, str) else _messages(value)
    head = [fields.string(document, "instructions")]
    opening = True
    for message in messages:
        if opening and message.role is Role.SYSTEM:
            head.append(message.text)
            continue
        if opening:
            yield from _system(head)
            opening = False
        yield message
    if opening:
        yield from _system(head)


def _system(texts: list[str]) -> Iterator[Message]:
    if text := "\n\n".join(filter(None, texts)):
        yield say(Role.SYSTEM, text)


@dataclass(slots=True)
class _Spoken:
    """The assistant's items since the last other one; `turn_id` is the mark they carry, if any."""

    turn_id: str = ""
    begun: bool = False
    blocks: list[Block] = field(default_factory=list)

    def add(self, turn_id: str, blocks: Iterable[Block]) -> None:
        self.begun = True
        self.turn_id = turn_id or self.turn_id
        self.blocks += blocks

    def end(self) -> Iterator[Message]:
        if not self.begun:
            return
        signed = any(isinstance(block, Reasoning) and block.signature == self.turn_id for block in self.blocks)
        if self.turn_id and not signed:
            self.blocks.insert(0, Reasoning("", self.turn_id))
        yield Message(Role.ASSISTANT, tuple(self.blocks))
        self.turn_id, self.begun, self.blocks = "", False, []


def _messages(value: object) -> Iterator[Message]:
    spoken = _Spoken()
    for index, entry in enumerate(fields.as_list(value, "input")):
        where = f"input[{index}]"
        item = fields.as_object(entry, where)
        kind = fields.string(item, "type", where) or "message"
        role = _role(item, where) if kind == "message" else None
        if role is Role.ASSISTANT or (role is None and kind in _SPOKEN):
            turn_id = _mark(item)
            if turn_id and spoken.turn_id and turn_id != spoken.turn_id:
                yield from spoken.end()
            spoken.add(turn_id, _SPOKEN[kind](item, where))
        elif role is Role.SYSTEM:
            yield from spoken.end()
            yield from _system([fields.joined(item.get("content"), f"{where}.content", "\n\n")])
        elif role is Role.USER:
            yield from spoken.end()
            yield Message(Role.USER, fields.texts(item.get("content"), f"{where}.content"))
        elif kind.endswith("_output"):
            yield from spoken.end()
            yield Message(Role.TOOL, (ToolResult(fields.string(item, "call_id", where), _output(item, where)),))
        elif kind == "item_reference":
            raise BadRequest(f"{where}: items are not stored here; send the item itself.", where)
    yield from spoken.end()


def _role(item: JsonObject, where: str) -> Role:
    name = item.get("role")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", f"{where}.role")
    return role


def _mark(item: JsonObject) -> str:
    """The turn an item of the assistant belongs to, as far as it tells."""
    if item.get("type") == "reasoning" and (sealed := _word(item, "encrypted_content")):
        return sealed
    ours = _OUR_ID.fullmatch(_word(item, "id"))
    return ours[1] if ours else ""


def _said(item: JsonObject, where: str) -> tuple[Block, ...]:
    return fields.texts(item.get("content"), f"{where}.content")


def _thought(item: JsonObject, where: str) -> tuple[Block, ...]:
    text = fields.joined(item.get("content"), f"{where}.content")
    text = text or fields.joined(item.get("summary"), f"{where}.summary")
    signature = _mark(item)
    return (Reasoning(text, signature),) if text or signature else ()


def _function_call(item: JsonObject, where: str) -> tuple[Block, ...]:
    arguments = item.get("arguments")
    if not isinstance(arguments, str):
        arguments = "{}" if arguments is None else fields.json_text(arguments, f"{where}.arguments")
    return (_call(item, where, arguments),)


def _custom_call(item: JsonObject, where: str) -> tuple[Block, ...]:
    return (_call(item, where, fields.json_text({"input": fields.string(item, "input", where)}, where)),)


def _call(item: JsonObject, where: str, arguments: str) -> ToolCall:
    name = _flat_name(fields.string(item, "namespace", where), fields.string(item, "name", where))
    return ToolCall(fields.string(item, "call_id", where), name, arguments)


def _shell_call(item: JsonObject, where: str) -> tuple[Block, ...]:
    call_id = fields.string(item, "call_id", where) or fields.string(item, "id", where)
    return (ToolCall(call_id, "local_shell", fields.json_text(item.get("action"), f"{where}.action")),)


_SPOKEN: dict[str, Callable[[JsonObject, str], tuple[Block, ...]]] = {
    "message": _said,
    "reasoning": _thought,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
}


def _output(item: JsonObject, where: str) -> str:
    output = item.get("output")
    return (
        fields.json_text(output, f"{where}.output")
        if isinstance(output, dict)
        else fields.result_text(output, f"{where}.output")
    )


def _response(request: WireRequest, response_id: str, created_s: int) -> dict[str, object]:
    """A response nothing was sampled for yet. What the session decides (sampling, tools) is not echoed."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created_s,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": request.turn.max_tokens,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto" if request.turn.calls_allowed else "none",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _finished(
    request: WireRequest, turn: TurnAnswer, created_s: int, items: list[dict[str, object]]
) -> dict[str, object]:
    cut = turn.end is TurnEnd.LENGTH
    return _response(request, f"resp_{turn.turn_id}", created_s) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": items,
        "usage": {
            "input_tokens": turn.prompt_tokens,
            "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": turn.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        },
    }


def _item(request: WireRequest, turn: TurnAnswer, index: int) -> dict[str, Any]:
    """A finished item of the output."""
    block, mark = turn.blocks[index], f"{turn.turn_id}.{index}"
    if isinstance(block, Reasoning):
        # As a summary: every release of every client shows it and echoes it.
        summary = [{"type": "summary_text", "text": block.text}] if block.text else []
        return {"id": f"rs_{mark}", "type": "reasoning", "summary": summary, "encrypted_content": turn.turn_id}
    if isinstance(block, ToolCall):
        return _call_item(request, block, mark)
    assert isinstance(block, Text)
    content = [{"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}]
    cut = turn.end is TurnEnd.LENGTH and index == len(turn.blocks) - 1
    status = "incomplete" if cut else "completed"
    return {"id": f"msg_{mark}", "type": "message", "status": status, "role": "assistant", "content": content}


def _call_item(request: WireRequest, call: ToolCall, mark: str) -> dict[str, Any]:
    shape = request.call_shapes.get(call.name, CallShape(name=call.name))
    head = {"status": "completed", "call_id": call.id, "name": shape.name}
    if shape.namespace:
        head["namespace"] = shape.namespace
    if shape.freeform:
        return {"id": f"ctc_{mark}", "type": "custom_tool_call"} | head | {"input": _free_input(call.arguments)}
    return {"id": f"fc_{mark}", "type": "function_call"} | head | {"arguments": call.arguments}


def _free_input(arguments: str) -> str:
    """The one argument of a free-form tool; arguments that are not of that form go out as they are."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


@dataclass(slots=True)
class _EventWriter:
    """Numbers the events."""

    parts: list[bytes] = field(default_factory=list)

    def write(self, kind: str, **content: object) -> None:
        self.parts.append(events.event({"type": kind, "sequence_number": len(self.parts)} | content))


def _write_item(writer: _EventWriter, index: int, item: dict[str, Any]) -> None:
    place = {"output_index": index, "item_id": item["id"]}
    empty = {name: "" if isinstance(value, str) else [] for name, value in item.items() if name in _GROWING}
    opened = item | empty | ({"status": "in_progress"} if "status" in item else {})
    writer.write("response.output_item.added", output_index=index, item=opened)
    if item["type"] == "reasoning":
        _write_summary(writer, place, item["summary"])
    elif item["type"] == "message":
        _write_text(writer, place | {"content_index": 0}, item["content"][0])
    elif item["type"] == "function_call":
        writer.write("response.function_call_arguments.delta", **place, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        writer.write("response.function_call_arguments.done", **place, **done)
    else:
        writer.write("response.custom_tool_call_input.delta", **place, delta=item["input"])
        writer.write("response.custom_tool_call_input.done", **place, input=item["input"])
    writer.write("response.output_item.done", output_index=index, item=item)


def _write_summary(writer: _EventWriter, place: dict[str, Any], summary: list[dict[str, str]]) -> None:
    for number, part in enumerate(summary):
        here = place | {"summary_index": number}
        writer.write("response.reasoning_summary_part.added", **here, part=part | {"text": ""})
        writer.write("response.reasoning_summary_text.delta", **here, delta=part["text"])
        writer.write("response.reasoning_summary_text.done", **here, text=part["text"])
        writer.write("response.reasoning_summary_part.done", **here, part=part)


def _write_text(writer: _EventWriter, place: dict[str, Any], part: dict[str, Any]) -> None:
    writer.write("response.content_part.added", **place, part=part | {"text": ""})
    writer.write("response.output_text.delta", **place, delta=part["text"], logprobs=[])
    writer.write("response.output_text.done", **place, text=part["text"], logprobs=[])
    writer.write("response.content_part.done", **place, part=part)
