"""Dialect of Chat Completions: requests of mini-swe-agent, qwen-code and opencode; answers as their clients parse
them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from headrace.serve.gateway.conversation import (
    AnswerTokens,
    AnswerWithTokens,
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    ToolSpec,
    TurnAnswer,
    TurnEnd,
    say,
)
from headrace.serve.gateway.dialects.chat import ChatCompletions
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

DIALECT = ChatCompletions()
USER = {"role": "user", "content": "hello"}
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"type": "function", "function": {"name": "bash", "description": "Runs", "parameters": PARAMETERS}}
CALL = ToolCall("call_1", "bash", '{"command": "ls"}')
WIRE_CALL = {"id": "call_1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}


def parse(**body: object) -> WireRequest:
    return DIALECT.parse(orjson.dumps({"model": "gpt-x", "messages": [USER]} | body), {})


def messages(*entries: object) -> tuple[Message, ...]:
    return parse(messages=list(entries)).turn.messages


def answered(*blocks: Any, end: TurnEnd = TurnEnd.CALLS) -> TurnAnswer:
    return TurnAnswer(turn_id="t1", blocks=blocks, end=end, prompt_tokens=5, completion_tokens=2, cached_tokens=3)


def test_a_tool_turn_of_mini_swe_agent_is_parsed() -> None:
    said = {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "hm",
        "tool_calls": [WIRE_CALL, WIRE_CALL | {"id": "call_2"}],
        "function_call": None,
        "provider_specific_fields": {"refusal": None, "reasoning_content": "hm"},
        "annotations": [],
    }
    request = parse(
        messages=[
            {"role": "system", "content": "rules"},
            USER,
            said,
            {"role": "tool", "tool_call_id": "call_1", "content": "a"},
            {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "b"}], "name": "bash"},
        ],
        tools=[BASH],
        parallel_tool_calls=True,
        temperature=0.0,
        drop_params=True,
    )
    assert request.turn.messages == (
        say(Role.SYSTEM, "rules"),
        say(Role.USER, "hello"),
        Message(Role.ASSISTANT, (Reasoning("hm"), Text("I look."), CALL, ToolCall("call_2", "bash", CALL.arguments))),
        Message(Role.TOOL, (ToolResult("call_1", "a"), ToolResult("call_2", "b"))),
    )
    assert request.turn.tools == (ToolSpec("bash", "Runs", PARAMETERS),)
    assert (request.stream, request.include_usage, request.turn.max_tokens) == (False, False, None)


def test_a_streaming_request_of_qwen_code_is_parsed() -> None:
    request = parse(
        messages=[
            {"role": "system", "content": "rules"},
            {"role": "user", "content": [{"type": "text", "text": "This is the context."}]},
            {"role": "assistant", "content": "Got it. Thanks for the context!"},
            USER,
        ],
        tools=[BASH],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=8000,
        metadata={"sessionId": "1"},
    )
    assert (request.stream, request.include_usage, request.turn.max_tokens) == (True, True, 8000)
    assert [message.role for message in request.turn.messages] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.USER]


def test_a_side_call_of_opencode_without_tools_is_parsed() -> None:
    entries = [{"role": "system", "content": "title"}, USER, {"role": "user", "content": '"fix it"\n'}]
    request = parse(messages=entries, stream=True, tool_choice=None, tools=None)
    assert (request.turn.tools, len(request.turn.messages)) == ((), 3)


def test_request_fields_are_parsed() -> None:
    request = parse(max_tokens=9, max_completion_tokens=7, stop="END", tool_choice="none", surprise={"x": 1})
    assert (request.turn.max_tokens, request.turn.stop, request.turn.calls_allowed) == (7, ("END",), False)
    assert (request.model, request.turn.model) == ("gpt-x", "gpt-x")
    unnamed = parse(model=None, tools=[{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}])
    assert (unnamed.model, unnamed.turn.model, unnamed.turn.tools) == ("policy", "", ())


def test_a_message_to_continue_and_a_kept_stop_string_are_parsed() -> None:
    said = {"role": "assistant", "content": "I look. "}
    fields = {"continue_final_message": True, "add_generation_prompt": False, "include_stop_str_in_output": True}
    request = parse(messages=[USER, said], **fields)
    assert (request.turn.continues, request.turn.keeps_stop) == (True, True)
    assert request.turn.messages[-1] == Message(Role.ASSISTANT, (Text("I look. "),))
    assert parse(messages=[USER, said | {"content": ""}], continue_final_message=True).turn.continues
    plain = parse(add_generation_prompt=True, continue_final_message=False)
    assert (plain.turn.continues, plain.turn.keeps_stop) == (False, False)


def test_developer_and_later_system_messages_keep_their_positions() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages({"role": "developer", "content": parts}, USER, {"role": "system", "content": "c"}) == (
        say(Role.SYSTEM, "a\n\nb"),
        say(Role.USER, "hello"),
        say(Role.SYSTEM, "c"),
    )


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_null_empty_and_missing_contents_are_equivalent(content: dict[str, object]) -> None:
    said = messages({"role": "assistant", "tool_calls": [WIRE_CALL], "reasoning_content": ""} | content, USER)
    assert said[0] == Message(Role.ASSISTANT, (CALL,))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ({"arguments": '{"a'}, '{"a'),
        ({"arguments": ""}, ""),
        ({"arguments": None}, "{}"),
        ({}, "{}"),
        ({"arguments": {"a": 1}}, '{"a":1}'),
    ],
)
def test_arguments_are_not_changed(function: dict[str, object], arguments: str) -> None:
    call = {"id": "1", "function": {"name": "bash"} | function}
    said = messages({"role": "assistant", "tool_calls": [call, {"type": "custom", "custom": {}}]}, USER)
    assert said[0].blocks == (ToolCall("1", "bash", arguments),)


def test_reasoning_is_parsed_under_both_field_names() -> None:
    for extra in ({"reasoning_content": "hm"}, {"reasoning": "hm"}, {"reasoning_content": "hm", "reasoning": "other"}):
        assert messages({"role": "assistant", "content": "a"} | extra, USER)[0].blocks == (Reasoning("hm"), Text("a"))
    assert messages({"role": "assistant", "content": "a", "reasoning": {"x": 1}}, USER)[0].blocks == (Text("a"),)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"role": "wizard", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, USER]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}, USER]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "tool", "tool_call_id": 7, "content": "x"}]}, "messages[0].tool_call_id"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"n": "1"}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [BASH, 3]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "bash"}}}, "tool_choice"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x" * 257]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"model": 3}, "model"),
    ],
)
def test_unsupported_parameters_are_named_in_the_refusal(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**wrong)
    assert caught.value.field == field
    error = DIALECT.error(caught.value)["error"]
    assert error == {
        "message": str(caught.value),
        "type": "invalid_request_error",
        "param": field,
        "code": "invalid_request",
    }


def test_an_answer_is_encoded_as_a_chat_completion() -> None:
    turn = answered(Reasoning("hm"), Text("I look."), CALL)
    assert DIALECT.answer(parse(), turn, created_s=7) == {
        "id": "chatcmpl-t1",
        "object": "chat.completion",
        "created": 7,
        "model": "gpt-x",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "I look.",
                    "refusal": None,
                    "tool_calls": [WIRE_CALL],
                    "reasoning_content": "hm",
                },
                "finish_reason": "tool_calls",
                "stop_reason": None,
                "logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 2,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (TurnEnd.STOP, "stop"),
        (TurnEnd.STOP_STRING, "stop"),
        (TurnEnd.CALLS, "tool_calls"),
        (TurnEnd.LENGTH, "length"),
    ],
)
@pytest.mark.parametrize(
    "blocks",
    [
        (Text("a\u2028b\x85c"), Text("d")),
        (Reasoning("one"), Text("x"), Reasoning("two")),
        (CALL, ToolCall("call_2", "bash", '{"a')),
        (Reasoning("hm"), CALL),
        (Reasoning("hm"),),
        (),
    ],
)
def test_the_streamed_events_match_the_complete_answer(blocks: tuple[Any, ...], end: TurnEnd, reason: str) -> None:
    request, turn = parse(stream=True, stream_options={"include_usage": True}), answered(*blocks, end=end)
    folded = wires.fold_chat(DIALECT.ping + DIALECT.stream(request, turn, created_s=7))
    whole: Any = DIALECT.answer(request, turn, created_s=7)
    (choice,) = whole["choices"]
    assert folded["message"] | {"refusal": None} == choice["message"]
    assert folded["finish_reason"] == choice["finish_reason"] == reason
    assert folded["usage"] == whole["usage"]


def test_content_is_null_or_empty_for_answers_without_text() -> None:
    def content(*blocks: Any) -> object:
        document: Any = DIALECT.answer(parse(), answered(*blocks), created_s=7)
        return document["choices"][0]["message"]["content"]

    assert content(CALL) is None
    assert content(Reasoning("hm")) == ""
    assert content() == ""


@pytest.mark.parametrize("asked", [True, False, None])
def test_a_stream_ends_with_usage_only_if_requested(asked: bool | None) -> None:
    request = parse(stream=True, stream_options={"include_usage": asked})
    events = wires.read_events(DIALECT.stream(request, answered(Text("a")), created_s=7))
    chunks = [data for _, data in events[:-1]]
    assert [chunk["choices"] == [] for chunk in chunks].count(True) == (1 if asked else 0)
    assert all(("usage" in chunk) is bool(asked) for chunk in chunks)


def test_a_client_echo_is_parsed_as_the_sampled_turn() -> None:
    blocks = (Reasoning("hm"), Text("I look.\n"), CALL, ToolCall("call_2", "bash", '{"a'))
    request, turn = parse(stream=True), answered(*blocks)
    echo = wires.fold_chat(DIALECT.stream(request, turn, created_s=7))["message"]
    assert messages(USER, echo, {"role": "tool", "tool_call_id": "call_1", "content": ""})[1].blocks == blocks


SENTENCES = {"no": "no", "gone": "gone", "big": "big"} | dict.fromkeys(("engine", "shut", "bug"), SERVER_FAILED)
"""What an agent is told; names of hosts and paths are for the session's record."""


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (BadRequest("no", "stop"), 400, "invalid_request_error"),
        (SessionUnknown("gone"), 400, "invalid_request_error"),
        (BodyTooLarge("big"), 413, "invalid_request_error"),
        (InfraError("engine"), 503, "server_error"),
        (NoEngineOpen("shut"), 503, "server_error"),
        (GatewayBroken("bug"), 500, "server_error"),
    ],
)
def test_errors_have_the_format_of_the_api(failure: WireError, status: int, kind: str) -> None:
    error = {"message": SENTENCES[str(failure)], "type": kind, "param": failure.field, "code": failure.code}
    assert (DIALECT.status(failure), DIALECT.error(failure)) == (status, {"error": error})
    assert not DIALECT.refuses_in_stream(failure)
    # No [DONE]: a client must not take this for an end.
    assert wires.read_events(DIALECT.stream_error(parse(), failure)) == [("", {"error": error})]


def test_context_exceeded_has_openais_code_and_wording() -> None:
    failure = ContextExceeded("too long", tokens=70000, limit=60000)
    error: Any = DIALECT.error(failure)["error"]
    assert (DIALECT.status(failure), error["type"], error["code"]) == (
        400,
        "invalid_request_error",
        "context_length_exceeded",
    )
    assert error["message"].startswith("This model's maximum context length is 60000 tokens. However,")
    assert "70000 tokens" in error["message"]


def test_the_model_list_has_openais_format() -> None:
    assert DIALECT.models(7) == {
        "object": "list",
        "data": [{"id": "policy", "object": "model", "created": 7, "owned_by": "headrace"}],
    }


TOKENS = AnswerTokens(prompt_ids=[5, 6], ids=[7, 8], logprobs=[-0.5, -0.25], pieces=[b"\xc3", b"\xa9"])


def test_only_what_is_asked_for_is_told_of_the_tokens() -> None:
    turn = AnswerWithTokens.of(answered(Text("é"), end=TurnEnd.STOP), TOKENS)

    def answer(**asked: object) -> dict[str, Any]:
        return DIALECT.answer(parse(**asked), turn, created_s=0)

    plain = answer(return_tokens_as_token_ids=True, top_logprobs=4)
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    ids = answer(return_token_ids=True)
    assert (ids["prompt_token_ids"], ids["choices"][0]["token_ids"]) == ([5, 6], [7, 8])
    assert ids["choices"][0]["logprobs"] is None
    whole = answer(logprobs=True, top_logprobs=0)
    assert "prompt_token_ids" not in whole
    assert whole["choices"][0]["logprobs"]["content"] == [
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3], "top_logprobs": []},
        {"token": "\ufffd", "logprob": -0.25, "bytes": [0xA9], "top_logprobs": []},
    ]
    named = answer(logprobs=True, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["content"]
    assert [(one["token"], one["bytes"]) for one in named] == [("token_id:7", [0xC3]), ("token_id:8", [0xA9])]


def test_a_stream_tells_the_tokens_once_whatever_blocks_it_has() -> None:
    request = parse(stream=True, logprobs=True, return_token_ids=True)
    for blocks in ((), (Text("a"),), (Reasoning("r"), Text("a"), CALL)):
        stream = DIALECT.stream(request, AnswerWithTokens.of(answered(*blocks), TOKENS), created_s=0)
        chunks = [data for _, data in wires.read_events(stream)[:-1]]
        assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[5, 6]] + [None] * (len(chunks) - 1)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert [token for choice in choices for token in choice.get("token_ids") or ()] == [7, 8]
        logprobs = [one["logprob"] for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert logprobs == [-0.5, -0.25]


def test_an_answer_of_which_nothing_was_sampled_has_null_tokens() -> None:
    turn = AnswerWithTokens.of(answered(Text("over"), end=TurnEnd.STOP), None)
    whole: dict[str, Any] = DIALECT.answer(parse(logprobs=True, return_token_ids=True), turn, created_s=0)
    [choice] = whole["choices"]
    assert (whole["prompt_token_ids"], choice["token_ids"], choice["logprobs"]) == (None, None, None)


@pytest.mark.parametrize("name", ["logprobs", "return_token_ids", "return_tokens_as_token_ids"])
def test_a_token_field_that_is_no_boolean_is_refused(name: str) -> None:
    with pytest.raises(BadRequest) as refused:
        parse(**{name: 1})
    assert refused.value.field == name


def test_alternatives_to_the_sampled_tokens_are_refused() -> None:
    with pytest.raises(BadRequest, match="top_logprobs must be 0"):
        parse(logprobs=True, top_logprobs=3)
