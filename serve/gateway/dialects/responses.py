"""The dialect of OpenAI's Responses API: `POST /v1/responses`, with and without streaming.

Invariants:
- Consecutive assistant items are one message, or two if their ids show that they come from two sampled turns.
- The turn's id is echoed as the `encrypted_content` of a reasoning item, or in the ids of our items (`msg_<turn
  id>.<number>`), which agents echo as well; other ids are ignored.
- The policy sees a tool in a `namespace` as `<namespace>__<name>`; Codex gets the name and the namespace separately. A
  `custom` tool has the single argument `input`.
- No response is stored: a request that refers to an earlier response is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from headrace.serve.gateway.conversation import (
    Block,
    Message,
    Reasoning,
    RequestPurpose,
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
from headrace.serve.gateway.dialects.dialect import CallShape, WireRequest
from headrace.serve.gateway.dialects.fields import JsonObject
from headrace.serve.gateway.errors import (
    BadRequest,
    BodyTooLarge,
    ContextExceeded,
    InfraError,
    TooManyRequests,
    WireError,
)

METADATA = "x-codex-turn-metadata"
SUBAGENT = "x-openai-subagent"
COMPACTING_SUBAGENT = "compact"
"""Subagent label with which older versions of Codex mark a compaction; newer ones send `request_kind`."""

_ROLES = {"assistant": Role.ASSISTANT, "developer": Role.SYSTEM, "system": Role.SYSTEM, "user": Role.USER}
# Neither our turn ids nor the ids of other providers contain a dot.
_OUR_ID = re.compile(r"(?:rs|msg|fc|ctc)_([A-Za-z0-9_-]+)\.[0-9]+")
_FREEFORM_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
}
_GROWING = ("arguments", "content", "input", "summary")
"""Fields of an item that are empty in its `added` event."""
_STORED = {
    "previous_response_id": "previous_response_id: responses are not stored here; send the whole conversation.",
    "conversation": "conversation: conversations are not stored here; send the whole conversation as input.",
    "background": "background: responses are not stored here; wait for the answer, or stream it.",
}


class Responses:
    """Dialect of `POST /v1/responses`."""

    @property
    def ping(self) -> bytes:
        # Codex ends a stream without an event for 300 s, not counting comments. This event is OpenAI's own.
        return openai.event({"type": "keepalive", "sequence_number": 0})

    def parse(self, body: bytes, headers: Mapping[str, str]) -> WireRequest:
        document = fields.read_request(body, "input")
        for name, sentence in _STORED.items():
            if document.get(name):
                raise BadRequest(sentence, name)
        model = fields.string(document, "model")
        tools, shapes = _KNOWN_TOOLS.of(document.get("tools"))
        choice = constraints.openai_choice(document.get("tool_choice"), tools, _chosen_name)
        text = document.get("text")
        form = None if text is None else fields.as_object(text, "text").get("format")
        agent, purpose = _codex(document, headers)
        turn = TurnRequest(
            messages=fields.checked(_conversation(document), "input"),
            tools=tools,
            calls_allowed=choice.allowed,
            constraint=choice.forced or constraints.text_format(form, "text.format"),
            max_tokens=fields.max_tokens(document, "max_output_tokens"),
            model=model,
            sampling=fields.sampling_digest(document),
            client=fields.client(headers),
            agent=agent,
            purpose=purpose,
        )
        stream = fields.boolean(document, "stream")
        return WireRequest(turn=turn, stream=stream, model=model or fields.DEFAULT_MODEL, call_shapes=shapes)

    def count(self, prompt_tokens: int) -> dict[str, object]:
        """Return the response to `POST /v1/responses/input_tokens`."""
        return {"object": "response.input_tokens", "input_tokens": prompt_tokens}

    def answer(
        self, request: WireRequest, turn: TurnAnswer, *, created_s: int, others: Sequence[TurnAnswer] = ()
    ) -> dict[str, object]:
        items = [_item(request, turn, index) for index in range(len(turn.blocks))]
        return _finished(request, turn, created_s, items)

    def stream(
        self, request: WireRequest, turn: TurnAnswer, *, created_s: int, others: Sequence[TurnAnswer] = ()
    ) -> bytes:
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
        # Codex retries 413 five times.
        return 400 if isinstance(failure, BodyTooLarge) else openai.status(failure)

    def error(self, failure: WireError) -> dict[str, object]:
        return openai.error(failure)

    def refuses_in_stream(self, failure: WireError) -> bool:
        # Only newer releases of Codex recognise this failure by the status 400 too.
        return isinstance(failure, ContextExceeded)

    def stream_error(self, request: WireRequest, failure: WireError) -> bytes:
        writer = _EventWriter()
        response = _response(request, "resp_failed", 0)
        writer.write("response.created", response=response)
        # Codex retries `server_error` and `rate_limit_exceeded`, and stops at the other codes.
        code = "server_error" if isinstance(failure, InfraError) else "invalid_prompt"
        if isinstance(failure, (ContextExceeded, TooManyRequests)):
            code = failure.code
        error = {"code": code, "message": openai.sentence(failure)}
        writer.write("response.failed", response=response | {"status": "failed", "error": error})
        return b"".join(writer.parts)

    def models(self, created_s: int) -> dict[str, object]:
        return openai.models(created_s)

    def model(self, name: str, created_s: int) -> dict[str, object]:
        return openai.model(name, created_s)


def _codex(document: JsonObject, headers: Mapping[str, str]) -> tuple[str, RequestPurpose]:
    """Return the Codex thread that sent the request ("" for the main one), and the purpose of the request."""
    client = _object_in(document.get("client_metadata"))
    metadata = _object_in(fields.header(headers, METADATA) or client.get(METADATA))
    label = fields.header(headers, SUBAGENT) or _word(client, SUBAGENT)
    compacts = metadata.get("request_kind") == RequestPurpose.COMPACTION.value or label == COMPACTING_SUBAGENT
    child = metadata.get("thread_source") == "subagent" or metadata.get("parent_thread_id")
    agent = ""
    if child or label not in ("", COMPACTING_SUBAGENT):
        agent = _word(metadata, "thread_id") or fields.header(headers, "thread-id") or label
    return agent[: fields.MAX_AGENT_CHARACTERS], RequestPurpose.COMPACTION if compacts else RequestPurpose.TURN


def _object_in(value: object) -> JsonObject:
    """Return an object that is given directly or as JSON text; an empty object for anything else."""
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


def _chosen_name(choice: JsonObject, where: str) -> str:
    """Return the name of a chosen tool as the policy sees it."""
    return _flat_name(fields.string(choice, "namespace", where), fields.string(choice, "name", where))


def _tools(value: object) -> tuple[tuple[ToolSpec, ...], dict[str, CallShape]]:
    """Return the tools for the policy, and the shapes of those whose calls are not plain functions on the wire."""
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
            form, parameters = tool.get("format"), _FREEFORM_PARAMETERS
            if isinstance(form, dict) and isinstance(form.get("definition"), str):
                grammar = f"The input follows this grammar ({form.get('syntax')}):\n{form['definition']}"
                description = f"{description}\n\n{grammar}" if description else grammar
        else:
            parameters = fields.tool_parameters(tool.get("parameters"), f"{where}.parameters")
        specs.append(ToolSpec(flat, description, parameters))
        if namespace or kind == "custom":
            shapes[flat] = CallShape(name=name, namespace=namespace, freeform=kind == "custom")
    return tuple(specs), shapes


_KNOWN_TOOLS = fields.KnownTools(_tools)


def _flat_tools(value: object) -> Iterator[tuple[str, JsonObject, str]]:
    """Yield the namespace, description and JSON path of every tool."""
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


def _conversation(document: JsonObject) -> Iterator[Message]:
    """Yield the messages; system messages that precede all other messages are appended to `instructions`."""
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
class _AssistantItems:
    """Assistant items since the last item of another role; `turn_id` is the turn that their ids name, if any."""

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
    spoken = _AssistantItems()
    for index, entry in enumerate(fields.as_list(value, "input")):
        where = f"input[{index}]"
        item = fields.as_object(entry, where)
        kind, role = fields.string(item, "type", where) or "message", None
        if kind == "message":
            name = item.get("role")
            role = _ROLES.get(name) if isinstance(name, str) else None
            if role is None:
                raise BadRequest(f"{where}.role must be one of {', '.join(_ROLES)}.", f"{where}.role")
        if role is Role.ASSISTANT or (role is None and kind in _ASSISTANT_ITEMS):
            turn_id = _turn_id_of(item)
            if turn_id and spoken.turn_id and turn_id != spoken.turn_id:
                yield from spoken.end()
            spoken.add(turn_id, _ASSISTANT_ITEMS[kind](item, where))
        elif role is Role.SYSTEM:
            yield from spoken.end()
            yield from _system([fields.joined(item.get("content"), f"{where}.content", "\n\n")])
        elif role is Role.USER:
            yield from spoken.end()
            yield Message(Role.USER, fields.texts(item.get("content"), f"{where}.content"))
        elif kind.endswith("_output"):
            yield from spoken.end()
            output, path = item.get("output"), f"{where}.output"
            text = fields.json_text(output, path) if isinstance(output, dict) else fields.result_text(output, path)
            yield Message(Role.TOOL, (ToolResult(fields.string(item, "call_id", where), text),))
        elif kind == "item_reference":
            raise BadRequest(f"{where}: items are not stored here; send the item itself.", where)
    yield from spoken.end()


def _turn_id_of(item: JsonObject) -> str:
    """Return the turn id of an assistant item, or "" if it has none."""
    if item.get("type") == "reasoning" and (sealed := _word(item, "encrypted_content")):
        return sealed
    ours = _OUR_ID.fullmatch(_word(item, "id"))
    return ours[1] if ours else ""


def _message(item: JsonObject, where: str) -> tuple[Block, ...]:
    return fields.texts(item.get("content"), f"{where}.content")


def _reasoning(item: JsonObject, where: str) -> tuple[Block, ...]:
    text = fields.joined(item.get("content"), f"{where}.content")
    text = text or fields.joined(item.get("summary"), f"{where}.summary")
    signature = _turn_id_of(item)
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


_ASSISTANT_ITEMS: dict[str, Callable[[JsonObject, str], tuple[Block, ...]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
}


def _response(request: WireRequest, response_id: str, created_s: int) -> dict[str, object]:
    """Return the response as it is before anything has been sampled. Parameters that the session decides (sampling,
    tools) are not echoed."""
    choice = "auto" if request.turn.calls_allowed else "none"
    if (form := request.turn.constraint) is not None and form.kind.forces_call:
        choice = "required"
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
        "tool_choice": choice,
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
    """Return a finished item of the output."""
    block, mark = turn.blocks[index], f"{turn.turn_id}.{index}"
    if isinstance(block, Reasoning):
        # As a summary, which every release of every client shows and echoes.
        summary = [{"type": "summary_text", "text": block.text}] if block.text else []
        return {"id": f"rs_{mark}", "type": "reasoning", "summary": summary, "encrypted_content": turn.turn_id}
    if isinstance(block, ToolCall):
        shape = request.call_shapes.get(block.name, CallShape(name=block.name))
        head = {"status": "completed", "call_id": block.id, "name": shape.name}
        if shape.namespace:
            head["namespace"] = shape.namespace
        if shape.freeform:
            return {"id": f"ctc_{mark}", "type": "custom_tool_call"} | head | {"input": _free_input(block.arguments)}
        return {"id": f"fc_{mark}", "type": "function_call"} | head | {"arguments": block.arguments}
    assert isinstance(block, Text)
    content = [{"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}]
    cut = turn.end is TurnEnd.LENGTH and index == len(turn.blocks) - 1
    status = "incomplete" if cut else "completed"
    return {"id": f"msg_{mark}", "type": "message", "status": status, "role": "assistant", "content": content}


def _free_input(arguments: str) -> str:
    """Return the single argument of a free-form tool; arguments in any other form are returned unchanged."""
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


@dataclass(slots=True)
class _EventWriter:
    """Writer of one stream's numbered events."""

    parts: list[bytes] = field(default_factory=list)

    def write(self, kind: str, **content: object) -> None:
        self.parts.append(openai.event({"type": kind, "sequence_number": len(self.parts)} | content))


def _write_item(writer: _EventWriter, index: int, item: dict[str, Any]) -> None:
    place = {"output_index": index, "item_id": item["id"]}
    empty = {name: "" if isinstance(value, str) else [] for name, value in item.items() if name in _GROWING}
    opened = item | empty | ({"status": "in_progress"} if "status" in item else {})
    writer.write("response.output_item.added", output_index=index, item=opened)
    if item["type"] == "reasoning":
        for number, part in enumerate(item["summary"]):
            here = place | {"summary_index": number}
            writer.write("response.reasoning_summary_part.added", **here, part=part | {"text": ""})
            writer.write("response.reasoning_summary_text.delta", **here, delta=part["text"])
            writer.write("response.reasoning_summary_text.done", **here, text=part["text"])
            writer.write("response.reasoning_summary_part.done", **here, part=part)
    elif item["type"] == "message":
        part, here = item["content"][0], place | {"content_index": 0}
        writer.write("response.content_part.added", **here, part=part | {"text": ""})
        writer.write("response.output_text.delta", **here, delta=part["text"], logprobs=[])
        writer.write("response.output_text.done", **here, text=part["text"], logprobs=[])
        writer.write("response.content_part.done", **here, part=part)
    elif item["type"] == "function_call":
        writer.write("response.function_call_arguments.delta", **place, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        writer.write("response.function_call_arguments.done", **place, **done)
    else:
        writer.write("response.custom_tool_call_input.delta", **place, delta=item["input"])
        writer.write("response.custom_tool_call_input.done", **place, input=item["input"])
    writer.write("response.output_item.done", output_index=index, item=item)
