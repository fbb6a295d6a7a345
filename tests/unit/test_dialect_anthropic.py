"""Dialect of the Messages API: parsing of Claude Code's requests; answers and streams as its client parses them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from headrace.serve.gateway.conversation import (
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
    say,
)
from headrace.serve.gateway.dialects.anthropic import AnthropicMessages
from headrace.serve.gateway.dialects.dialect import WireRequest
from headrace.serve.gateway.errors import (
    SERVER_FAILED,
    BadRequest,
    BodyTooLarge,
    ContextExceeded,
    GatewayBroken,
    InfraError,
    NoEngineOpen,
    SessionUnknown,
    WireError,
)
from support import wires

DIALECT = AnthropicMessages()
USER = {"role": "user", "content": "hello"}
BASH = {"name": "Bash", "description": "Runs", "input_schema": {"type": "object", "properties": {"command": {}}}}
ALL_BLOCKS = (
    Reasoning("hm", "t-1_x"),
    Text("I look."),
    ToolCall("toolu_1", "Bash", '{"command": "ls"}'),
    ToolCall("toolu_2", "Bash", '{"command": "ec'),
)


def parse(headers: dict[str, str] | None = None, **body: object) -> WireRequest:
    document = {"model": "claude-x", "max_tokens": 100, "messages": [USER]} | body
    return DIALECT.parse(orjson.dumps(document), headers or {})


def messages(*entries: object, **body: object) -> tuple[Message, ...]:
    return parse(messages=list(entries), **body).turn.messages


def answered(blocks: tuple[Any, ...] = ALL_BLOCKS, end: TurnEnd = TurnEnd.CALLS, stop_string: str = "") -> TurnAnswer:
    return TurnAnswer(
        turn_id="t-1_x",
        blocks=blocks,
        end=end,
        stop_string=stop_string,
        prompt_tokens=70,
        completion_tokens=9,
        cached_tokens=64,
    )


def test_a_first_request_of_claude_code_is_parsed() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    request = parse(
        headers={"Anthropic-Version": "2023-06-01", "X-Stainless-Retry-Count": "0"},
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.1f; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are Claude."} | cached,
            {"type": "text", "text": "\nDo the task."} | cached,
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "<r>\n\n"}, {"type": "text", "text": "go"} | cached]},
            {"role": "system", "content": "Skills: none"},
        ],
        tools=[BASH | cached | {"defer_loading": False}],
        metadata={"user_id": '{"session_id": "1"}'},
        thinking={"type": "adaptive"},
        output_config={"effort": "high"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        stream=True,
        temperature=0.1,
        max_tokens=32000,
        stop_sequences=["END", "\n"],
    )
    turn = request.turn
    assert turn.messages == (
        say(Role.SYSTEM, "You are Claude.\n\n\nDo the task."),
        Message(Role.USER, (Text("<r>\n\n"), Text("go"))),
        say(Role.SYSTEM, "Skills: none"),
    )
    assert turn.tools == (ToolSpec("Bash", "Runs", {"type": "object", "properties": {"command": {}}}),)
    assert (turn.max_tokens, turn.stop, turn.calls_allowed) == (32000, ("END", "\n"), True)
    assert (turn.agent, turn.purpose, turn.model, request.model) == ("", RequestPurpose.TURN, "claude-x", "claude-x")
    assert request.stream


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cch=1; v=2\nYou are Claude.",
        "You are Claude.\nx-anthropic-billing-header: cch=2",
        [{"type": "text", "text": "You are Claude."}, {"type": "text", "text": "x-anthropic-billing-header: a"}],
        [{"type": "text", "text": "You are Claude.", "cache_control": None, "citations": []}],
    ],
)
def test_the_billing_line_is_removed_at_any_position(system: object) -> None:
    assert messages(USER, system=system)[0].text.strip() == "You are Claude."


def test_a_system_prompt_with_only_the_billing_line_is_dropped() -> None:
    assert messages(USER, system="x-anthropic-billing-header: a") == (say(Role.USER, "hello"),)


def test_tool_results_precede_the_text_of_their_message_in_order() -> None:
    results = [
        {"type": "text", "text": "first"},
        {
            "type": "tool_result",
            "tool_use_id": "b",
            "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}],
        },
        {"type": "tool_result", "tool_use_id": "a", "content": "z", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": " "},
        {"type": "text", "text": ""},
    ]
    assert messages(USER, {"role": "assistant", "content": "ok"}, {"role": "user", "content": results})[2:] == (
        Message(Role.TOOL, (ToolResult("b", "x\ny"), ToolResult("a", "z"), ToolResult("c", ""))),
        Message(Role.USER, (Text("first"), Text(" "))),
    )


def test_assistant_blocks_are_parsed_in_order() -> None:
    content = [
        {"type": "thinking", "thinking": "hm", "signature": "sig"},
        {"type": "redacted_thinking", "data": "opaque"},
        {"type": "text", "text": " \n", "citations": None},
        {"type": "tool_use", "id": "1", "name": "Edit", "input": {"b": 1, "a": "é"}, "caller": {"type": "direct"}},
        {"type": "tool_use", "id": "2", "name": "Bash", "input": [1]},
        {"type": "tool_use", "id": "3", "name": "Bash"},
        {"type": "tool_use", "id": "4", "name": "Bash", "input": {"__unparsedToolInput": {"raw": '{"a', "len": 3}}},
        {"type": "server_tool_use", "id": "5", "name": "web_search", "input": {}},
    ]
    assert messages(USER, {"role": "assistant", "content": content}, USER)[1].blocks == (
        Reasoning("hm", "sig"),
        Reasoning("", "opaque"),
        Text(" \n"),
        ToolCall("1", "Edit", '{"b":1,"a":"é"}'),
        ToolCall("2", "Bash", "[1]"),
        ToolCall("3", "Bash", "{}"),
        ToolCall("4", "Bash", '{"a'),
    )


def test_null_empty_and_missing_contents_are_equivalent() -> None:
    forms: list[dict[str, object]] = [{}, {"content": None}, {"content": ""}, {"content": []}]
    forms.append({"content": [{"type": "text", "text": ""}]})
    for role in ("user", "assistant"):
        read = {messages(USER, {"role": role} | form, USER) for form in forms}
        assert read == {(say(Role.USER, "hello"), Message(Role(role), ()), say(Role.USER, "hello"))}


def test_consecutive_assistant_messages_are_not_merged() -> None:
    said = {"role": "assistant", "content": "a"}
    assert len(messages(USER, said, said, USER)) == 4


def test_known_built_in_tools_get_their_schema_and_others_are_dropped() -> None:
    tools = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 9},
        {"type": "text_editor_20250124", "name": "str_replace_editor"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1},
        {"type": "tool_of_tomorrow"},
        {"type": "custom", "name": "Read", "input_schema": None},
    ]
    read = parse(tools=tools).turn.tools
    assert [tool.name for tool in read] == ["bash", "str_replace_based_edit_tool", "str_replace_editor", "Read"]
    assert set(read[0].parameters["properties"]) == {"command", "restart"}
    assert "insert_text" in read[1].parameters["properties"]
    assert "undo_edit" in read[2].parameters["properties"]["command"]["enum"]


@pytest.mark.parametrize(("choice", "allowed"), [(None, True), ({"type": "auto"}, True), ({"type": "none"}, False)])
def test_tool_choice_auto_and_none_are_accepted(choice: object, allowed: bool) -> None:
    assert parse(tool_choice=choice).turn.calls_allowed is allowed


def test_the_subagent_header_is_case_insensitive() -> None:
    assert parse(headers={"X-Claude-Code-Agent-Id": "agent-1"}).turn.agent == "agent-1"
    assert parse(headers={"x-claude-code-agent-id": "\udcff"}).turn.agent.encode() == b"?"


def test_count_tokens_accepts_a_final_assistant_message() -> None:
    body = orjson.dumps({"model": "m", "messages": [USER, {"role": "assistant", "content": "I"}]})
    assert DIALECT.parse_count(body, {}).turn.messages[-1] == say(Role.ASSISTANT, "I")
    assert DIALECT.count(12) == {"input_tokens": 12}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages"),
        ({"system": 5}, "system"),
        ({"stream": 1}, "stream"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": {"a": 1}}, "stop_sequences"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "Bash"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{}]}, "tools[0].name"),
        ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
        ({"model": 3}, "model"),
    ],
)
def test_unsupported_parameters_are_named_in_the_refusal(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**wrong)
    assert caught.value.field == field
    assert DIALECT.status(caught.value) == 400
    assert DIALECT.error(caught.value)["error"] == {"type": "invalid_request_error", "message": str(caught.value)}


def test_an_answer_is_encoded_as_an_anthropic_message() -> None:
    assert DIALECT.answer(parse(), answered(), created_s=0) == {
        "id": "msg_t-1_x",
        "type": "message",
        "role": "assistant",
        "model": "claude-x",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "t-1_x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            {
                "type": "tool_use",
                "id": "toolu_2",
                "name": "Bash",
                "input": {"__unparsedToolInput": {"raw": '{"command": "ec', "len": 15}},
            },
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 70,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 9,
        },
    }


@pytest.mark.parametrize(
    ("end", "stop_string", "reason"),
    [
        (TurnEnd.STOP, "", "end_turn"),
        (TurnEnd.STOP_STRING, "END", "stop_sequence"),
        (TurnEnd.CALLS, "", "tool_use"),
        (TurnEnd.LENGTH, "", "max_tokens"),
    ],
)
def test_the_streamed_events_match_the_complete_answer(end: TurnEnd, stop_string: str, reason: str) -> None:
    request, turn = parse(), answered(end=end, stop_string=stop_string)
    folded = wires.fold_anthropic(DIALECT.stream(request, turn, created_s=0))
    assert folded == DIALECT.answer(request, turn, created_s=0)
    assert (folded["stop_reason"], folded["stop_sequence"]) == (reason, stop_string or None)


def test_the_stream_begins_with_the_actual_prompt_length() -> None:
    name, data = wires.read_events(DIALECT.ping + DIALECT.stream(parse(), answered(), created_s=0))[1]
    assert (name, data["message"]["usage"]["input_tokens"], data["message"]["content"]) == ("message_start", 70, [])


def test_an_answer_without_a_block_is_a_message_without_content() -> None:
    turn = answered(blocks=(), end=TurnEnd.STOP)
    assert wires.fold_anthropic(DIALECT.stream(parse(), turn, created_s=0))["content"] == []


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_echo_is_parsed_as_the_sampled_turn(streamed: bool) -> None:
    request, turn = parse(), answered()
    if streamed:
        served = wires.fold_anthropic(DIALECT.stream(request, turn, created_s=0))
    else:
        served = orjson.loads(orjson.dumps(DIALECT.answer(request, turn, created_s=0)))
    echo = {"role": "assistant", "content": served["content"]}
    # The wire carries an object, so blanks between its members are not echoed.
    expected = (*ALL_BLOCKS[:2], ToolCall("toolu_1", "Bash", '{"command":"ls"}'), ALL_BLOCKS[3])
    assert messages(USER, echo, USER)[1].blocks == expected


@pytest.mark.parametrize("arguments", ["", "[1]", "null", '{"a":' * 300 + "1" + "}" * 300, "NaN", '"\\ud800"'])
def test_arguments_that_are_not_an_object_survive_the_round_trip(arguments: str) -> None:
    document = DIALECT.answer(parse(), answered(blocks=(ToolCall("1", "Bash", arguments),)), created_s=0)
    (block,) = orjson.loads(orjson.dumps(document))["content"]
    assert block["input"] == ({"__unparsedToolInput": {"raw": arguments, "len": len(arguments)}} if arguments else {})


SENTENCES = {"no": "no", "gone": "gone", "big": "big"} | dict.fromkeys(("engine", "shut", "bug"), SERVER_FAILED)
"""What an agent is told; names of hosts and paths are for the session's record."""


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (BadRequest("no", "stop"), 400, "invalid_request_error"),
        (SessionUnknown("gone"), 400, "invalid_request_error"),
        (BodyTooLarge("big"), 413, "request_too_large"),
        (InfraError("engine"), 529, "overloaded_error"),
        (NoEngineOpen("shut"), 529, "overloaded_error"),
        (GatewayBroken("bug"), 500, "api_error"),
    ],
)
def test_errors_have_the_format_of_the_api(failure: WireError, status: int, kind: str) -> None:
    body = {"type": "error", "error": {"type": kind, "message": SENTENCES[str(failure)]}}
    assert (DIALECT.status(failure), DIALECT.error(failure)) == (status, body)
    assert not DIALECT.refuses_in_stream(failure)
    assert wires.read_events(DIALECT.stream_error(parse(), failure)) == [("error", body)]


@pytest.mark.parametrize(("tokens", "said"), [(70000, 70000), (None, 60001), (59999, 60001)])
def test_context_exceeded_is_worded_so_that_claude_code_compacts(tokens: int | None, said: int) -> None:
    failure = ContextExceeded("too long", tokens=tokens, limit=60000)
    message = f"prompt is too long: {said} tokens > 60000 maximum"
    assert DIALECT.status(failure) == 400
    assert DIALECT.error(failure)["error"] == {"type": "invalid_request_error", "message": message}


def test_the_model_list_has_anthropics_format() -> None:
    assert DIALECT.models(0) == {
        "data": [
            {"type": "model", "id": "policy", "display_name": "policy", "created_at": "1970-01-01T00:00:00+00:00"}
        ],
        "has_more": False,
        "first_id": "policy",
        "last_id": "policy",
    }


def test_an_image_in_a_tool_result_is_replaced_by_a_note() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}
    body = orjson.dumps({"messages": [{"role": "user", "content": [result]}]})
    [message] = AnthropicMessages().parse(body, {}).turn.messages
    assert message.text == "[not shown: this model reads text only]\nx"
