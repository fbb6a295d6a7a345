"""What requests demand of their answers, on the three wires."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, cast

import pytest

from headrace.serve.gateway.capture.matching import options_digest
from headrace.serve.gateway.conversation import (
    Constraint,
    ConstraintKind,
    Message,
    Role,
    Text,
    ToolCall,
    ToolResult,
    TurnAnswer,
    TurnEnd,
    TurnRequest,
    say,
)
from headrace.serve.gateway.dialects.anthropic import AnthropicMessages
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.dialects.dialect import Dialect, WireRequest
from headrace.serve.gateway.dialects.responses import Responses
from headrace.serve.gateway.errors import BadRequest
from support.wires import read_events

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type":"object","properties":{"a":{"type":"integer"}}}'
USER = [{"role": "user", "content": "go"}]
CHAT, ANTHROPIC, RESPONSES = ChatCompletions(), AnthropicMessages(), Responses()
BODIES: dict[Dialect, dict[str, Any]] = {
    CHAT: {
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("bash", "look")],
    },
    ANTHROPIC: {"messages": USER, "tools": [{"name": name, "input_schema": SCHEMA} for name in ("bash", "look")]},
    RESPONSES: {
        "input": "go",
        "tools": [
            {"type": "function", "name": "bash", "parameters": SCHEMA},
            {"type": "namespace", "name": "mcp", "tools": [{"type": "function", "name": "look"}]},
            {"type": "custom", "name": "patch"},
        ],
    },
}


def parse(dialect: Dialect, **fields: object) -> WireRequest:
    body = {name: value for name, value in (BODIES[dialect] | fields).items() if value is not None}
    return dialect.parse(json.dumps(body).encode(), {})


def call(*names: str, kind: ConstraintKind = ConstraintKind.CALL) -> Constraint:
    return Constraint(kind, names=names)


NAMED = ConstraintKind.NAMED_CALL


@pytest.mark.parametrize(
    ("dialect", "choice", "expected"),
    [
        (CHAT, "required", call()),
        (CHAT, {"type": "function", "function": {"name": "bash"}}, call("bash", kind=NAMED)),
        (
            CHAT,
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": name}} for name in ("look", "bash", "look")],
                },
            },
            call("bash", "look"),
        ),
        (CHAT, "auto", None),
        (ANTHROPIC, {"type": "any", "disable_parallel_tool_use": True}, call()),
        (ANTHROPIC, {"type": "tool", "name": "look"}, call("look", kind=NAMED)),
        (ANTHROPIC, {"type": "auto"}, None),
        (RESPONSES, "required", call()),
        (RESPONSES, {"type": "function", "name": "bash"}, call("bash", kind=NAMED)),
        (RESPONSES, {"type": "function", "name": "look", "namespace": "mcp"}, call("mcp__look", kind=NAMED)),
        (RESPONSES, {"type": "custom", "name": "patch"}, call("patch", kind=NAMED)),
        (
            RESPONSES,
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "bash"}]},
            call("bash"),
        ),
    ],
)
def test_forced_calls_are_read(dialect: Dialect, choice: object, expected: Constraint | None) -> None:
    turn = parse(dialect, tool_choice=choice).turn
    assert (turn.constraint, turn.calls_allowed) == (expected, True)


FORMATS: list[tuple[Dialect, dict[str, Any]]] = [
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
    ),
    (ANTHROPIC, {"output_format": {"type": "json_schema", "schema": SCHEMA}}),
    (ANTHROPIC, {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}}),
    (RESPONSES, {"text": {"verbosity": "low", "format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
]


@pytest.mark.parametrize(("dialect", "fields"), FORMATS)
def test_json_schemas_are_read(dialect: Dialect, fields: dict[str, Any]) -> None:
    expected = Constraint(ConstraintKind.JSON_SCHEMA, schema=TEXT)
    assert parse(dialect, **fields).turn.constraint == expected
    none = {"type": "none"} if dialect is ANTHROPIC else "none"
    turn = parse(dialect, tool_choice=none, **fields).turn
    assert (turn.constraint, turn.calls_allowed) == (expected, False)
    forced = {"type": "any"} if dialect is ANTHROPIC else "required"
    assert parse(dialect, tool_choice=forced, **fields).turn.constraint == call(), "a forced call has no text"


def test_json_objects_are_read_and_other_formats_ignored() -> None:
    expected = Constraint(ConstraintKind.JSON_OBJECT)
    assert parse(CHAT, response_format={"type": "json_object"}).turn.constraint == expected
    assert parse(RESPONSES, text={"format": {"type": "json_object"}}).turn.constraint == expected
    for form in (None, {"type": "text"}, {"type": "of tomorrow"}, {}):
        assert parse(CHAT, response_format=form).turn.constraint is None
        assert parse(RESPONSES, text={"format": form}).turn.constraint is None
        assert parse(ANTHROPIC, output_format=form, output_config={"format": form}).turn.constraint is None


DEEP: dict[str, Any] = {}
for _ in range(240):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("dialect", "fields", "field", "sentence"),
    [
        (CHAT, {"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "tool_choice", "no tool 'rm'"),
        (CHAT, {"tool_choice": {"type": "function"}}, "tool_choice.function", "must be an object"),
        (CHAT, {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, "tool_choice", "mode"),
        (
            CHAT,
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}},
            "tool_choice",
            "mode",
        ),
        (CHAT, {"tool_choice": "always"}, "tool_choice", "must be auto, none, required"),
        (CHAT, {"response_format": "json"}, "response_format", "must be an object"),
        (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "must be an object",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
            "response_format.json_schema.schema",
            "too deeply",
        ),
        (
            CHAT,
            {
                "response_format": {"type": "json_object"},
                "messages": [*USER, {"role": "assistant", "content": "{"}],
                "continue_final_message": True,
            },
            "response_format",
            "continue_final_message",
        ),
        (ANTHROPIC, {"tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice", "no tool 'rm'"),
        (ANTHROPIC, {"tool_choice": {"type": "tool"}}, "tool_choice", "no tool ''"),
        (ANTHROPIC, {"tool_choice": {"type": "any"}, "tools": None}, "tool_choice", "no tools"),
        (ANTHROPIC, {"tool_choice": {"type": "required"}}, "tool_choice", "must be auto, none, any or tool"),
        (ANTHROPIC, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "object"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "rm"}}, "tool_choice", "no tool 'rm'"),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "look"}}, "tool_choice", "no tool 'look'"),
        (RESPONSES, {"tool_choice": {"type": "web_search"}}, "tool_choice", "no tool ''"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": 7}}}, "text.format.schema", "object"),
    ],
)
def test_demands_that_cannot_be_met_are_refused(
    dialect: Dialect, fields: dict[str, Any], field: str, sentence: str
) -> None:
    with pytest.raises(BadRequest, match=sentence) as refused:
        parse(dialect, **fields)
    assert refused.value.field == field


def test_requests_with_other_demands_are_other_requests() -> None:
    free = TurnRequest(messages=(say(Role.USER, "go"),))
    forms = [
        None,
        call(),
        call("a"),
        call("a", kind=NAMED),
        Constraint(ConstraintKind.JSON_OBJECT),
        Constraint(ConstraintKind.JSON_SCHEMA, schema="{}"),
        Constraint(ConstraintKind.JSON_SCHEMA, schema='{"type":"object"}'),
    ]
    digests = [options_digest(replace(free, constraint=form)) for form in forms]
    assert len(set(digests)) == len(forms)
    elsewhere = replace(forms[1], field="x") if forms[1] else None
    assert options_digest(replace(free, constraint=elsewhere)) == digests[1]


def test_responses_repeat_that_a_call_is_forced() -> None:
    answered = [
        RESPONSES.stream_error(parse(RESPONSES, tool_choice=choice), BadRequest("no"))
        for choice in ("required", {"type": "function", "name": "bash"}, "auto", "none")
    ]
    named = [b'"tool_choice":"required"', b'"tool_choice":"required"', b'"tool_choice":"auto"', b'"tool_choice":"none"']
    assert all(name in stream for name, stream in zip(named, answered, strict=True))


LEGACY = {
    "tools": None,
    "functions": [{"name": "bash", "parameters": SCHEMA}, {"name": "look", "description": "d"}],
}


def test_legacy_functions_are_tools() -> None:
    request = parse(CHAT, **LEGACY)
    assert [(tool.name, tool.description) for tool in request.turn.tools] == [("bash", ""), ("look", "d")]
    assert request.turn.tools[0] == parse(CHAT).turn.tools[0]
    assert (request.legacy_calls, request.turn.constraint, request.turn.calls_allowed) == (True, None, True)
    assert parse(CHAT, **LEGACY, function_call={"name": "look"}).turn.constraint == call("look", kind=NAMED)
    assert not parse(CHAT, **LEGACY, function_call="none").turn.calls_allowed
    both = parse(CHAT, functions=[{"name": "other"}], function_call={"name": "other"})
    assert (both.legacy_calls, both.turn.constraint, len(both.turn.tools)) == (False, None, 2)


def test_legacy_messages_are_calls_and_results() -> None:
    arguments = '{"a": 1}'
    history = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "bash", "arguments": arguments}},
        {"role": "function", "name": "bash", "content": "out"},
    ]
    asked, called, result = parse(CHAT, **LEGACY, messages=history).turn.messages
    assert asked == say(Role.USER, "go")
    assert called == Message(Role.ASSISTANT, (ToolCall("", "bash", arguments),))
    assert result == Message(Role.TOOL, (ToolResult("", "out"),))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"function_call": {"name": "rm"}}, "function_call"),
        ({"function_call": {}}, "function_call"),
        ({"function_call": "always"}, "function_call"),
        ({"functions": {"name": "bash"}}, "functions"),
        ({"functions": [{"parameters": {}}]}, "functions[0].name"),
        ({"functions": [{"name": "f"}] * 1025}, "functions"),
        ({"messages": [{"role": "assistant", "function_call": "f"}, *USER]}, "messages[0].function_call"),
    ],
)
def test_wrong_legacy_functions_are_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(CHAT, **LEGACY | fields)
    assert refused.value.field == field


def test_legacy_answers_hold_the_first_call() -> None:
    calls = tuple(ToolCall(f"c{number}", "bash", f'{{"a": {number}}}') for number in range(2))
    turn = TurnAnswer(turn_id="t1", blocks=(Text("So."), *calls), end=TurnEnd.CALLS)
    request = parse(CHAT, **LEGACY)
    [choice] = cast("list[dict[str, Any]]", CHAT.answer(request, turn, created_s=1)["choices"])
    message = {
        "role": "assistant",
        "content": "So.",
        "refusal": None,
        "function_call": {"name": "bash", "arguments": '{"a": 0}'},
    }
    assert (choice["message"], choice["finish_reason"]) == (message, "function_call")
    chunks = [data["choices"][0] for _, data in read_events(CHAT.stream(request, turn, created_s=1))[:-1]]
    deltas = [chunk["delta"] for chunk in chunks]
    assert [delta["function_call"] for delta in deltas if "function_call" in delta] == [message["function_call"]]
    assert not any("tool_calls" in delta for delta in deltas)
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["function_call"]
