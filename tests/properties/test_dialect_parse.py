"""For any bytes, a dialect parses them or raises BadRequest; and it parses its own answers."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.serve.gateway.conversation import (
    Message,
    Reasoning,
    Role,
    Text,
    ToolCall,
    ToolResult,
    TurnAnswer,
    TurnEnd,
)
from headrace.serve.gateway.dialects.dialect import Dialect, WireRequest
from headrace.serve.gateway.errors import BadRequest
from support import wires
from support.spoiled_bodies import WIRES, mutants

BODIES = st.sampled_from(WIRES).flatmap(
    lambda wire: st.tuples(st.just(wire[0]), mutants(wire[1]) | st.binary(max_size=60))
)
HEADERS = st.dictionaries(
    st.sampled_from(["X-Claude-Code-Agent-Id", "x-codex-turn-metadata", "x-openai-subagent", "thread-id"]),
    st.sampled_from(["", "a", "{", "[]", "\udcff", '{"parent_thread_id": 5}', '{"thread_id": {}}', "\x00", "9" * 5000]),
    max_size=2,
)


def _check(dialect: Dialect, body: bytes, headers: dict[str, str]) -> None:
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


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=BODIES, headers=HEADERS)
def test_any_bytes_are_parsed_or_refused(case: tuple[Dialect, bytes], headers: dict[str, str]) -> None:
    _check(*case, headers)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=BODIES, headers=HEADERS)
def test_ten_thousand_bodies_are_parsed_or_refused(case: tuple[Dialect, bytes], headers: dict[str, str]) -> None:
    _check(*case, headers)


@pytest.mark.parametrize(("dialect", "body"), WIRES)
def test_unmutated_bodies_are_valid(dialect: Dialect, body: dict[str, Any]) -> None:
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
def test_an_echoed_turn_is_parsed_as_it_was_sampled(blocks: tuple[Any, ...]) -> None:
    turn = TurnAnswer(turn_id="t-9", blocks=blocks, end=TurnEnd.CALLS)
    for (dialect, body), echo in zip(WIRES, (_echo_anthropic, _echo_chat, _echo_responses), strict=True):
        request = dialect.parse(orjson.dumps(body), {})
        document = echo(body, dialect.stream(request, turn, created_s=0))
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


def _echo_anthropic(body: dict[str, Any], stream: bytes) -> dict[str, Any]:
    said = {"role": "assistant", "content": wires.fold_anthropic(stream)["content"]}
    return body | {"messages": [*body["messages"], said, {"role": "user", "content": "on"}]}


def _echo_chat(body: dict[str, Any], stream: bytes) -> dict[str, Any]:
    return body | {
        "messages": [*body["messages"], wires.fold_chat(stream)["message"], {"role": "user", "content": "on"}]
    }


def _echo_responses(body: dict[str, Any], stream: bytes) -> dict[str, Any]:
    return body | {
        "input": [*body["input"], *wires.fold_responses(stream)["output"], {"role": "user", "content": "on"}]
    }
