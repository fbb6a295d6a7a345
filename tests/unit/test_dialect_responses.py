"""Dialect of the Responses API: parsing of Codex's requests; answers and streams as its client parses them."""

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
    TurnAnswer,
    TurnEnd,
    say,
)
from headrace.serve.gateway.dialects.dialect import CallShape, WireRequest
from headrace.serve.gateway.dialects.responses import Responses
from headrace.serve.gateway.errors import (
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

DIALECT = Responses()
PARAMETERS = {"type": "object", "properties": {"cmd": {"type": "string"}}}
EXEC = {"type": "function", "name": "exec_command", "description": "Runs", "strict": False, "parameters": PARAMETERS}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Agents",
    "tools": [{"type": "function", "name": "spawn_agent", "parameters": PARAMETERS}],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}
TURN_ID = "t-1_x"
ALL_BLOCKS = (
    Reasoning("hm", TURN_ID),
    Text("I look."),
    ToolCall("call_1", "exec_command", '{"cmd": "ls"}'),
    ToolCall("call_2", "multi_agent_v1__spawn_agent", '{"message": "go"}'),
    ToolCall("call_3", "apply_patch", '{"input":"*** Begin\\n"}'),
    ToolCall("call_4", "exec_command", '{"cmd": "ec'),
)


def item(role: str, *texts: str, **extra: object) -> dict[str, object]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]} | extra


USER = item("user", "hello")


def parse(headers: dict[str, str] | None = None, **body: object) -> WireRequest:
    return DIALECT.parse(orjson.dumps({"model": "policy", "input": [USER]} | body), headers or {})


def messages(*items: object, **body: object) -> tuple[Message, ...]:
    return parse(input=list(items), **body).turn.messages


def answered(*blocks: Any, end: TurnEnd = TurnEnd.CALLS) -> TurnAnswer:
    return TurnAnswer(turn_id=TURN_ID, blocks=blocks, end=end, prompt_tokens=5, completion_tokens=2, cached_tokens=3)


def test_a_first_request_of_codex_is_parsed() -> None:
    request = parse(
        input=[
            item("developer", "You are Codex.", id="msg_44f8dece"),
            item("developer", "<permissions>", "<skills>", id="msg_01a1"),
            item("user", "<environment_context>", id="msg_01a2"),
            item("user", "fix it", id="msg_01a3"),
        ],
        tools=[EXEC, AGENTS, PATCH, {"type": "web_search", "external_web_access": True}, {"type": "local_shell"}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="01a1",
        client_metadata={"thread_id": "01a1"},
        stream=True,
    )
    turn = request.turn
    assert turn.messages == (
        say(Role.SYSTEM, "You are Codex.\n\n<permissions>\n\n<skills>"),
        say(Role.USER, "<environment_context>"),
        say(Role.USER, "fix it"),
    )
    names = ["exec_command", "multi_agent_v1__spawn_agent", "apply_patch"]
    assert [tool.name for tool in turn.tools] == names
    assert turn.tools[2].description == "Edits\n\nThe input follows this grammar (lark):\nstart: x"
    assert set(turn.tools[2].parameters["properties"]) == {"input"}
    assert request.call_shapes == {
        names[1]: CallShape(name="spawn_agent", namespace="multi_agent_v1"),
        names[2]: CallShape(name="apply_patch", freeform=True),
    }
    assert (request.stream, turn.max_tokens, turn.agent, turn.purpose) == (True, None, "", RequestPurpose.TURN)


def test_instructions_precede_the_leading_developer_messages() -> None:
    head = [item("developer", "a"), {"role": "system", "content": "b"}]
    later = item("developer", "c", "d")
    assert messages(*head, USER, later, instructions="first") == (
        say(Role.SYSTEM, "first\n\na\n\nb"),
        say(Role.USER, "hello"),
        say(Role.SYSTEM, "c\n\nd"),
    )
    assert parse(input="hello", instructions=None).turn.messages == (say(Role.USER, "hello"),)
    assert messages(item("developer", "only")) == (say(Role.SYSTEM, "only"),)


def test_items_of_one_turn_form_one_message_and_its_outputs_another() -> None:
    items = [
        USER,
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "x",
        },
        item("assistant", "I look.", id="msg_2", status="completed", phase=None),
        {"type": "function_call", "id": "fc_3", "call_id": "a", "name": "exec_command", "arguments": '{"cmd": 1}'},
        {"type": "web_search_call", "id": "ws_4", "status": "completed", "action": {"type": "search"}},
        {"type": "custom_tool_call", "id": "ctc_5", "call_id": "b", "name": "apply_patch", "input": "*** é"},
        {"type": "local_shell_call", "id": "lsh_6", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "function_call", "call_id": "d", "namespace": "multi_agent_v1", "name": "wait", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "local_shell_call_output", "call_id": "c", "output": None},
        {"type": "function_call_output", "id": "fco_7", "call_id": "d", "output": {"content": "3", "success": False}},
    ]
    assert messages(*items)[1:] == (
        Message(
            Role.ASSISTANT,
            (
                Reasoning("hm", "x"),
                Text("I look."),
                ToolCall("a", "exec_command", '{"cmd": 1}'),
                ToolCall("b", "apply_patch", '{"input":"*** é"}'),
                ToolCall("c", "local_shell", '{"type":"exec","command":["ls"]}'),
                ToolCall("d", "multi_agent_v1__wait", "{}"),
            ),
        ),
        Message(
            Role.TOOL,
            (
                ToolResult("b", "1"),
                ToolResult("a", "2"),
                ToolResult("c", ""),
                ToolResult("d", '{"content":"3","success":false}'),
            ),
        ),
    )


def test_raw_reasoning_is_preferred_to_its_summary() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}]}
    raw = {"content": [{"type": "reasoning_text", "text": "long"}]}
    assert messages(thought, USER)[0].blocks == (Reasoning("short"),)
    assert messages(thought | raw, USER)[0].blocks == (Reasoning("long"),)
    assert messages(thought | {"summary": [], "content": None}, USER)[0].blocks == ()


@pytest.mark.parametrize(
    "items",
    [
        [item("assistant", "I", id="msg_t9.0")],
        [item("assistant", "I", id="msg_t9.0"), {"type": "reasoning", "id": "rs_t9.1", "summary": []}],
        [item("assistant", "I"), {"type": "reasoning", "encrypted_content": "t9", "summary": []}],
    ],
)
def test_a_turn_can_be_identified_by_our_item_ids(items: list[dict[str, object]]) -> None:
    blocks = messages(USER, *items, USER)[1].blocks
    assert Reasoning("", "t9") in blocks
    assert len(blocks) == 2


@pytest.mark.parametrize("item_id", [None, "", "msg_abc", "msg_t9_0", "xyz_t9.0", "msg_t9.0\n", "msg_.0"])
def test_foreign_item_ids_are_ignored(item_id: str | None) -> None:
    assert messages(USER, item("assistant", "I", id=item_id), USER)[1] == say(Role.ASSISTANT, "I")


def test_two_consecutive_turns_remain_two_messages() -> None:
    said = messages(USER, item("assistant", "a", id="msg_t1.0"), item("assistant", "b", id="msg_t2.0"), USER)
    assert [message.text for message in said] == ["hello", "a", "b", "hello"]
    merged = messages(USER, item("assistant", "a", id="msg_1"), item("assistant", "b", id="msg_2"), USER)
    assert [message.text for message in merged] == ["hello", "ab", "hello"]


def metadata(**fields: object) -> str:
    known = {
        "session_id": "s",
        "thread_id": "child",
        "window_number": 0,
        "request_kind": "turn",
        "thread_source": "user",
    }
    return orjson.dumps(known | fields).decode()


@pytest.mark.parametrize(
    ("headers", "client", "agent", "purpose"),
    [
        ({"X-Codex-Turn-Metadata": metadata()}, None, "", RequestPurpose.TURN),
        ({"x-codex-turn-metadata": metadata(request_kind="compaction")}, None, "", RequestPurpose.COMPACTION),
        ({"x-codex-turn-metadata": metadata(thread_source="subagent")}, None, "child", RequestPurpose.TURN),
        ({}, {"x-codex-turn-metadata": metadata(parent_thread_id="s")}, "child", RequestPurpose.TURN),
        ({"x-openai-subagent": "review", "Thread-Id": "t7"}, None, "t7", RequestPurpose.TURN),
        ({}, {"x-openai-subagent": "collab_spawn"}, "collab_spawn", RequestPurpose.TURN),
        ({"x-openai-subagent": "compact", "thread-id": "t7"}, None, "", RequestPurpose.COMPACTION),
        ({"x-codex-turn-metadata": "{"}, {"x-codex-turn-metadata": 5}, "", RequestPurpose.TURN),
        ({"x-codex-turn-metadata": '["\udcff"]'}, [], "", RequestPurpose.TURN),
    ],
)
def test_codex_agents_and_compactions_are_distinguished(
    headers: dict[str, str], client: object, agent: str, purpose: RequestPurpose
) -> None:
    turn = parse(headers, client_metadata=client).turn
    assert (turn.agent, turn.purpose) == (agent, purpose)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": ""}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"type": 5}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]"),
        ({"input": [USER, item("assistant", "I")]}, "input"),
        ({"input": [USER, {"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": 5, "name": "a"}]}, "input[0].call_id"),
        ({"instructions": 5}, "instructions"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "a"}}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": "no"}, "stream"),
        ({"model": []}, "model"),
    ],
)
def test_unsupported_parameters_are_named_in_the_refusal(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**wrong)
    assert caught.value.field == field
    assert DIALECT.status(caught.value) == 400


def test_an_answer_is_encoded_as_a_response_object() -> None:
    request = parse(tools=[EXEC, AGENTS, PATCH], max_output_tokens=9)
    document: Any = DIALECT.answer(request, answered(*ALL_BLOCKS), created_s=7)
    assert [document[name] for name in ("id", "object", "created_at", "status", "model", "max_output_tokens")] == [
        "resp_t-1_x",
        "response",
        7,
        "completed",
        "policy",
        9,
    ]
    assert (document["error"], document["incomplete_details"]) == (None, None)
    call = {"type": "function_call", "status": "completed"}
    assert document["output"] == [
        {
            "id": "rs_t-1_x.0",
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "t-1_x",
        },
        {
            "id": "msg_t-1_x.1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        call | {"id": "fc_t-1_x.2", "call_id": "call_1", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
        call
        | {"id": "fc_t-1_x.3", "call_id": "call_2", "name": "spawn_agent", "namespace": "multi_agent_v1"}
        | {"arguments": '{"message": "go"}'},
        {
            "id": "ctc_t-1_x.4",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_3",
            "name": "apply_patch",
            "input": "*** Begin\n",
        },
        call | {"id": "fc_t-1_x.5", "call_id": "call_4", "name": "exec_command", "arguments": '{"cmd": "ec'},
    ]
    assert document["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }


@pytest.mark.parametrize("end", list(TurnEnd))
@pytest.mark.parametrize("blocks", [ALL_BLOCKS, (Text("a\u2028"),), (Reasoning("", TURN_ID), Text("a")), ()])
def test_the_streamed_events_match_the_complete_answer(blocks: tuple[Any, ...], end: TurnEnd) -> None:
    request, turn = parse(tools=[EXEC, AGENTS, PATCH], stream=True), answered(*blocks, end=end)
    folded = wires.fold_responses(DIALECT.stream(request, turn, created_s=7))
    assert folded == DIALECT.answer(request, turn, created_s=7)


def test_a_truncated_turn_is_incomplete() -> None:
    turn = answered(Text("a"), Text("b"), end=TurnEnd.LENGTH)
    (*_, (name, last)) = wires.read_events(DIALECT.stream(parse(), turn, created_s=7))
    response = last["response"]
    assert (name, response["status"]) == ("response.incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [part["status"] for part in response["output"]] == ["completed", "incomplete"]


def test_an_item_is_empty_in_the_event_that_adds_it() -> None:
    stream = DIALECT.stream(parse(tools=[PATCH]), answered(*ALL_BLOCKS), created_s=7)
    added = [data["item"] for name, data in wires.read_events(stream) if name == "response.output_item.added"]
    grown = {name: value for part in added for name, value in part.items() if name in ("arguments", "content", "input")}
    assert grown == {"content": [], "arguments": "", "input": ""}
    assert {part.get("status", "in_progress") for part in added} == {"in_progress"}


@pytest.mark.parametrize("streamed", [False, True])
def test_a_codex_echo_is_parsed_as_the_sampled_turn(streamed: bool) -> None:
    request, turn = parse(tools=[EXEC, AGENTS, PATCH]), answered(*ALL_BLOCKS)
    if streamed:
        served = wires.fold_responses(DIALECT.stream(request, turn, created_s=7))
    else:
        served = orjson.loads(orjson.dumps(DIALECT.answer(request, turn, created_s=7)))
    result = {"type": "function_call_output", "call_id": "call_1", "output": ""}
    assert messages(USER, *served["output"], result)[1].blocks == ALL_BLOCKS
    anonymous = [{name: value for name, value in part.items() if name != "id"} for part in served["output"]]
    assert messages(USER, *anonymous, result)[1].blocks == ALL_BLOCKS


@pytest.mark.parametrize("arguments", ["", "{", "[1]", '{"input": 5}', '{"other": "x"}'])
def test_a_free_form_call_with_other_arguments_is_sent_unchanged(arguments: str) -> None:
    turn = answered(ToolCall("1", "apply_patch", arguments))
    document: Any = DIALECT.answer(parse(tools=[PATCH]), turn, created_s=7)
    assert document["output"][0]["input"] == arguments


@pytest.mark.parametrize(
    ("failure", "status", "kind", "code"),
    [
        (BadRequest("no", "stop"), 400, "invalid_request_error", "invalid_prompt"),
        (SessionUnknown("gone"), 400, "invalid_request_error", "invalid_prompt"),
        (BodyTooLarge("big"), 400, "invalid_request_error", "invalid_prompt"),
        (InfraError("engine"), 503, "server_error", "server_error"),
        (NoEngineOpen("shut"), 503, "server_error", "server_error"),
        (GatewayBroken("bug"), 500, "server_error", "server_error"),
        (ContextExceeded("full"), 400, "invalid_request_error", "context_length_exceeded"),
    ],
)
def test_errors_have_the_format_of_the_api(failure: WireError, status: int, kind: str, code: str) -> None:
    error: Any = DIALECT.error(failure)["error"]
    assert (DIALECT.status(failure), error["type"], error["code"]) == (status, kind, failure.code)
    assert DIALECT.refuses_in_stream(failure) is isinstance(failure, ContextExceeded)
    (*_, (name, last)) = wires.read_events(DIALECT.ping + DIALECT.stream_error(parse(stream=True), failure))
    assert (name, last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": code, "message": error["message"]}


def test_the_model_list_has_openais_format() -> None:
    assert DIALECT.models(7)["object"] == "list"
