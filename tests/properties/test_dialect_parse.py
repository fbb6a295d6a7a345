"""Whatever bytes arrive, a dialect reads them or refuses them with BadRequest; what it wrote it reads again."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.serve.conversation import (
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    TurnAnswer,
    TurnEnd,
)
from headrace.serve.dialects.anthropic import AnthropicMessages
from headrace.serve.dialects.chat import ChatCompletions
from headrace.serve.dialects.responses import Responses
from headrace.serve.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from headrace.serve.dialects.dialect import Dialect, WireRequest

SCHEMA = {"type": "object", "properties": {"command": {"type": "string", "enum": ["a"]}}, "required": ["command"]}


def _text(text: str, kind: str = "text") -> dict[str, object]:
    return {"type": kind, "text": text}


def _item(role: str, kind: str, text: str) -> dict[str, object]:
    return {"type": "message", "id": "msg_t1.0", "role": role, "content": [_text(text, kind)]}


ANTHROPIC_BODY = {
    "model": "claude-x",
    "system": [_text("x-anthropic-billing-header: a"), _text("rules") | {"cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [_text("<r>"), _text("go")]},
        {"role": "system", "content": "skills"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "t1"},
                {"type": "redacted_thinking", "data": "x"},
                _text("I look."),
                {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls", "n": 1.5}},
                {
                    "type": "tool_use",
                    "id": "b",
                    "name": "Bash",
                    "input": {"__unparsedToolInput": {"raw": "{", "len": 1}},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [_text("out")], "is_error": False},
                {"type": "tool_result", "tool_use_id": "b", "content": "bad"},
                _text("on"),
            ],
        },
    ],
    "tools": [{"name": "Bash", "description": "Runs", "input_schema": SCHEMA}, {"type": "bash_20250124", "name": "b"}],
    "tool_choice": {"type": "auto"},
    "stop_sequences": ["END"],
    "max_tokens": 9,
    "stream": True,
}
CHAT_BODY = {
    "model": "gpt-x",
    "messages": [
        {"role": "developer", "content": [_text("rules")]},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"command":1}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "out"},
    ],
    "tools": [{"type": "function", "function": {"name": "bash", "description": "Runs", "parameters": SCHEMA}}],
    "tool_choice": "auto",
    "stop": ["END"],
    "n": 1,
    "max_completion_tokens": 9,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSES_BODY = {
    "model": "gpt-x",
    "instructions": "first",
    "input": [
        _item("developer", "input_text", "rules"),
        _item("user", "input_text", "go"),
        {"type": "reasoning", "id": "rs_t1.0", "summary": [_text("hm", "summary_text")], "encrypted_content": "t1"},
        _item("assistant", "output_text", "I look."),
        {"type": "function_call", "id": "fc_t1.1", "call_id": "a", "name": "exec", "namespace": "n", "arguments": "{"},
        {"type": "custom_tool_call", "call_id": "b", "name": "apply_patch", "input": "x"},
        {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
        {"type": "function_call_output", "call_id": "a", "output": [_text("out", "input_text")]},
        {"type": "custom_tool_call_output", "call_id": "b", "output": {"content": "x"}},
    ],
    "tools": [
        {"type": "function", "name": "exec", "parameters": SCHEMA},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "exec", "parameters": SCHEMA}]},
        {"type": "custom", "name": "apply_patch", "format": {"syntax": "lark", "definition": "x"}},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "max_output_tokens": 9,
    "client_metadata": {"x-codex-turn-metadata": '{"thread_source":"subagent","thread_id":"x"}'},
    "stream": True,
}
WIRES: list[tuple[Dialect, dict[str, Any]]] = [
    (AnthropicMessages(), ANTHROPIC_BODY),
    (ChatCompletions(), CHAT_BODY),
    (Responses(), RESPONSES_BODY),
]


def _nested(levels: int) -> object:
    value: object = 1
    for level in range(levels):
        value = [value] if level % 2 else {"a": value}
    return value


SMALL = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        -1,
        1.5,
        2**63,
        "",
        " ",
        "x",
        "\x00",
        "é\u2028",
        "x" * 300,
        [],
        {},
        [None],
        [[]],
        {"a": None},
    ]
)
# Copies: the next change may go into them.
NASTY = (
    SMALL.map(copy.copy) | st.sampled_from([200, 240, 260, 400]).map(_nested) | st.builds(dict, type=st.just("image"))
)
WORDS = st.sampled_from(
    ["user", "assistant", "tool", "system", "text", "tool_result", "tool_use", "message", "reasoning", "function_call"]
)


@st.composite
def mutants(draw: st.DrawFn, body: dict[str, Any]) -> bytes:
    """A body of an agent with up to four places changed, and sometimes a few bytes too."""
    document: Any = orjson.loads(orjson.dumps(body))
    for _ in range(draw(st.integers(0, 4))):
        _change(draw, document)
    data = json.dumps(document).encode()  # deeper than orjson writes
    if draw(st.integers(0, 3)) == 0:
        at = draw(st.integers(0, len(data)))
        junk = draw(st.sampled_from([b"", b"\xff", b'"\\ud800"', b"NaN", b"1e999", b"[" * 1100, b"\x00", b",", b'\\"']))
        data = data[:at] + junk + data[at + draw(st.integers(0, 3)) :]
    return data


def _change(draw: st.DrawFn, document: Any) -> None:
    """Walk to a random place and replace, remove or double what is there."""
    node = document
    while True:
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = draw(st.sampled_from(keys))
        child = node[key]
        if isinstance(child, dict | list) and child and draw(st.integers(0, 4)):
            node = child
            continue
        action = draw(st.sampled_from(["replace", "replace", "word", "remove", "double"]))
        if action == "remove":
            del node[key]
        elif action == "double" and isinstance(node, list):
            node.append(child)
        else:
            node[key] = draw(WORDS if action == "word" else NASTY)
        return


BODIES = st.sampled_from(WIRES).flatmap(
    lambda wire: st.tuples(st.just(wire[0]), mutants(wire[1]) | st.binary(max_size=60))
)
HEADERS = st.dictionaries(
    st.sampled_from(["X-Claude-Code-Agent-Id", "x-codex-turn-metadata", "x-openai-subagent", "thread-id"]),
    st.sampled_from(["", "a", "{", "[]", "\udcff", '{"parent_thread_id": 5}', '{"thread_id": {}}', "\x00", "9" * 5000]),
    max_size=2,
)


def _check(wires: ModuleType, dialect: Dialect, body: bytes, headers: dict[str, str]) -> None:
    try:
        request = dialect.parse(body, headers)
    except BadRequest as error:
        assert orjson.dumps(dialect.error(error))
        assert len(str(error)) < 1000
        return
    _check_request(request)
    blocks = (Reasoning("hm", "t9"), Text("a"), *(ToolCall("c", tool.name, "{}") for tool in request.turn.tools))
    turn = TurnAnswer(turn_id="t9", blocks=blocks, end=TurnEnd.CALLS)
    assert orjson.dumps(dialect.answer(request, turn, created_s=0))
    assert wires.read_events(dialect.stream(request, turn, created_s=0))


def _check_request(request: WireRequest) -> None:
    turn = request.turn
    assert turn.messages
    assert turn.messages[-1].role is not Role.ASSISTANT
    for message in turn.messages:
        assert all(isinstance(block, ToolResult) == (message.role is Role.TOOL) for block in message.blocks)
        assert all(block != Text("") for block in message.blocks)
    for before, after in zip(turn.messages, turn.messages[1:], strict=False):
        assert not before.role is after.role is Role.TOOL
    # Every word of it can be logged, hashed and put into a template.
    repr(request).encode()
    assert orjson.dumps([[[[[[dict(tool.parameters) for tool in turn.tools]]]]]])
    assert turn.max_tokens is None or turn.max_tokens >= 1


@pytest.fixture(name="wires", scope="module")
def wires_fixture(load_support: Callable[[str], ModuleType]) -> ModuleType:
    return load_support("wires")


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=BODIES, headers=HEADERS)
def test_any_bytes_are_read_or_refused(wires: ModuleType, case: tuple[Dialect, bytes], headers: dict[str, str]) -> None:
    _check(wires, *case, headers)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=BODIES, headers=HEADERS)
def test_ten_thousand_bodies_are_read_or_refused(
    wires: ModuleType, case: tuple[Dialect, bytes], headers: dict[str, str]
) -> None:
    _check(wires, *case, headers)


@pytest.mark.parametrize(("dialect", "body"), WIRES)
def test_the_bodies_that_are_mutated_are_good(dialect: Dialect, body: dict[str, Any]) -> None:
    request = dialect.parse(orjson.dumps(body), {})
    assert {message.role for message in request.turn.messages} == set(Role)
    assert request.turn.tools


WORD = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
ARGUMENTS = st.dictionaries(WORD, st.integers() | WORD | st.lists(st.booleans(), max_size=2), max_size=2).map(
    lambda value: (
        orjson.dumps(value, option=orjson.OPT_PASSTHROUGH_SUBCLASS).decode()
        if all(not isinstance(item, int) or abs(item) < 2**53 for item in value.values())
        else "{}"
    )
)
SPOKEN = st.builds(
    lambda thoughts, said, calls: (*thoughts, *said, *calls),
    st.lists(WORD.map(lambda text: Reasoning(text, "t-9")), max_size=1),
    st.lists(WORD.map(Text), max_size=1),
    st.lists(st.builds(ToolCall, WORD, WORD, ARGUMENTS | WORD.filter(lambda text: text[0] in "{x<")), max_size=3),
).filter(bool)


@settings(max_examples=150, deadline=None)
@given(blocks=SPOKEN)
def test_an_echoed_turn_reads_as_it_was_sampled(wires: ModuleType, blocks: tuple[Any, ...]) -> None:
    turn = TurnAnswer(turn_id="t-9", blocks=blocks, end=TurnEnd.CALLS)
    for (dialect, body), echo in zip(WIRES, (_echo_anthropic, _echo_chat, _echo_responses), strict=True):
        request = dialect.parse(orjson.dumps(body), {})
        document = echo(wires, body, dialect.stream(request, turn, created_s=0))
        said = [
            message
            for message in dialect.parse(orjson.dumps(document), {}).turn.messages
            if message.role is Role.ASSISTANT
        ]
        assert _without_signatures(said[-1]) == _without_signatures(Message(Role.ASSISTANT, blocks))


def _without_signatures(message: Message) -> list[object]:
    """Texts and calls; the wire of Chat has no signature, that of Responses tells the turn without a text."""
    return [
        block.text if isinstance(block, Reasoning) else block
        for block in message.blocks
        if not isinstance(block, Reasoning) or block.text
    ]


def _echo_anthropic(wires: ModuleType, body: dict[str, Any], stream: bytes) -> dict[str, Any]:
    said = {"role": "assistant", "content": wires.fold_anthropic(stream)["content"]}
    return body | {"messages": [*body["messages"], said, {"role": "user", "content": "on"}]}


def _echo_chat(wires: ModuleType, body: dict[str, Any], stream: bytes) -> dict[str, Any]:
    return body | {
        "messages": [*body["messages"], wires.fold_chat(stream)["message"], {"role": "user", "content": "on"}]
    }


def _echo_responses(wires: ModuleType, body: dict[str, Any], stream: bytes) -> dict[str, Any]:
    return body | {
        "input": [*body["input"], *wires.fold_responses(stream)["output"], {"role": "user", "content": "on"}]
    }
