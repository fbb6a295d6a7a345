"""The Chat Completions dialect: what is read, what is refused, and how both look on the wire."""

from __future__ import annotations

import pickle

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.serve.conversation import Message, Role, TurnAnswer, TurnEnd
from headrace.serve.dialects import chat
from headrace.serve.errors import BadRequest, ContextExceeded, NoEngineOpen, WireError

USER = {"role": "user", "content": "hello"}


def body(**fields: object) -> bytes:
    return orjson.dumps({"model": "gpt-x", "messages": [USER]} | fields)


def test_messages_roles_and_text_parts_are_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "out", "tool_call_id": "7"},
    ]
    request = chat.parse(body(messages=messages, max_tokens=9, max_completion_tokens=7, stop="END", surprise={"x": 1}))
    assert request.turn.messages == (
        Message(role=Role.SYSTEM, content="rules"),
        Message(role=Role.USER, content="ab"),
        Message(role=Role.ASSISTANT, content=""),
        Message(role=Role.TOOL, content="out"),
    )
    assert (request.turn.max_tokens, request.turn.stop, request.model) == (7, ("END",), "gpt-x")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [USER, {"role": "wizard", "content": ""}]}, "messages[1].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": "I"}]}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"model": 3}, "model"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(wrong: dict[str, object], field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat.parse(body(**wrong))
    assert caught.value.field == field
    error = chat.error(caught.value)["error"]
    assert isinstance(error, dict)
    assert (error["type"], error["param"]) == ("invalid_request_error", field)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 5000, b'{"messages": NaN}'])
def test_a_body_that_is_no_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        chat.parse(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "user"]), inner, max_size=3)
    ),
    max_leaves=12,
)
FIELDS = st.sampled_from(["messages", "model", "n", "stop", "max_tokens", "stream", "tools", "other"])


@settings(max_examples=200, deadline=None)
@given(document=JSON | st.dictionaries(FIELDS, JSON, max_size=5))
def test_any_json_is_read_or_refused_never_a_crash(document: object) -> None:
    try:
        request = chat.parse(orjson.dumps(document))
    except BadRequest:
        return
    assert request.turn.messages


def test_the_answer_has_the_shape_of_a_chat_completion() -> None:
    request = chat.parse(body())
    turn = TurnAnswer(text="ls", end=TurnEnd.LENGTH, prompt_tokens=5, completion_tokens=2, cached_tokens=3)
    document = chat.answer(request, turn, answer_id="1", created_s=7)
    assert document["object"] == "chat.completion"
    assert document["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ls", "refusal": None},
            "finish_reason": "length",
            "logprobs": None,
        }
    ]
    assert document["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


@pytest.mark.parametrize("error", [BadRequest("no", "stop"), ContextExceeded("long", "messages"), NoEngineOpen("shut")])
def test_wire_errors_survive_pickling(error: WireError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert chat.error(copy) == chat.error(error)
