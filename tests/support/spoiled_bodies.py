"""Request bodies of agents of the three APIs, and their mutations."""

from __future__ import annotations

import copy
import json
from typing import Any

import orjson
from hypothesis import strategies as st

from headrace.serve.gateway.dialects.anthropic import AnthropicMessages
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.dialects.dialect import Dialect
from headrace.serve.gateway.dialects.responses import Responses

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


SMALL: st.SearchStrategy[Any] = st.sampled_from(
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
    """Generate an agent's body with up to four changed places, and sometimes changed bytes."""
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
