"""Input handling common to all dialects: broken JSON, depth, unusual strings; and pickling of their errors."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import orjson
import pytest

from headrace.serve.gateway.conversation import Role, Text, TurnAnswer, TurnEnd, say
from headrace.serve.gateway.dialects import fields
from headrace.serve.gateway.dialects.anthropic import AnthropicMessages
from headrace.serve.gateway.dialects.chat import ChatCompletions
from headrace.serve.gateway.dialects.dialect import Dialect
from headrace.serve.gateway.dialects.responses import Responses
from headrace.serve.gateway.errors import BadRequest, ContextExceeded, NoEngineOpen, WireError
from support import wires

WIRES: list[Dialect] = [AnthropicMessages(), ChatCompletions(), Responses()]
DEEPEST_SCHEMA = 200


def body(dialect: Dialect, text: str = "hello", schema: object = None) -> dict[str, Any]:
    user = {"role": "user", "content": text}
    if isinstance(dialect, AnthropicMessages):
        return {"messages": [user], "tools": [{"name": "a", "input_schema": schema}]}
    if isinstance(dialect, ChatCompletions):
        return {"messages": [user], "tools": [{"type": "function", "function": {"name": "a", "parameters": schema}}]}
    return {"input": [user], "tools": [{"type": "function", "name": "a", "parameters": schema}]}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"items": value}
    return value


@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"a":' * 1100 + b"1" + b"}" * 1100,
        b'{"messages": NaN}',
        b'{"max_tokens": 1e999}',
        b'{"input": "\\ud800", "messages": "\\ud800"}',
        b'{"model": "\xed\xa0\x80"}',
        b"{}",
    ],
    ids=lambda data: repr(data[:24]),
)
def test_a_body_without_messages_is_refused(dialect: Dialect, data: bytes) -> None:
    with pytest.raises(BadRequest):
        dialect.parse(data, {})


@pytest.mark.parametrize("kind", [[], {}, 7])
def test_a_part_with_a_type_that_is_not_a_string_is_refused(kind: object) -> None:
    with pytest.raises(BadRequest, match=r"there\[0\]\.type must be a string"):
        fields.result_text([{"type": kind, "text": "out"}], "there")


@pytest.mark.parametrize("dialect", WIRES)
def test_schemas_too_deeply_nested_to_serialize_are_refused(dialect: Dialect) -> None:
    read = dialect.parse(orjson.dumps(body(dialect, schema=nested(DEEPEST_SCHEMA))), {})
    assert read.turn.tools[0].parameters == nested(DEEPEST_SCHEMA)
    with pytest.raises(BadRequest, match="nested too deeply"):
        dialect.parse(json.dumps(body(dialect, schema=nested(240))).encode(), {})


@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize("text", ["\x00", "\u2028", "\U0001f600", " \n"])
def test_unusual_characters_are_preserved(dialect: Dialect, text: str) -> None:
    asked = dialect.parse(orjson.dumps(body(dialect, text)), {})
    assert asked.turn.messages == (say(Role.USER, text),)
    turn = TurnAnswer(turn_id="t", blocks=(Text(text),), end=TurnEnd.STOP)
    assert orjson.dumps(text)[1:-1] in orjson.dumps(dialect.answer(asked, turn, created_s=0))


@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize("number", [2**63, 2**64 - 1])
def test_a_huge_max_tokens_is_accepted(dialect: Dialect, number: int) -> None:
    wish = {"max_tokens": number, "max_output_tokens": number}
    assert dialect.parse(orjson.dumps(body(dialect) | wish), {}).turn.max_tokens == number
    with pytest.raises(BadRequest, match="whole number"):
        dialect.parse(json.dumps(body(dialect) | dict.fromkeys(wish, 2**64)).encode(), {})


@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize("name", ["cache_control", "betas", "store", "service_tier"])
def test_unknown_fields_are_ignored(dialect: Dialect, name: str) -> None:
    plain = dialect.parse(orjson.dumps(body(dialect)), {})
    assert dialect.parse(orjson.dumps(body(dialect) | {name: {"x": [None]}}), {}) == plain


@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize("name", ["temperature", "seed", "logit_bias", "presence_penalty"])
def test_sampling_parameters_change_only_their_digest(dialect: Dialect, name: str) -> None:
    plain = dialect.parse(orjson.dumps(body(dialect)), {}).turn
    given = [dialect.parse(orjson.dumps(body(dialect) | {name: {"x": [value]}}), {}).turn for value in (None, 1)]
    assert [replace(turn, sampling="") for turn in given] == [plain, plain]
    assert len({plain.sampling, *(turn.sampling for turn in given)}) == 3


@pytest.mark.parametrize("dialect", WIRES)
def test_pings_are_not_part_of_the_turn(dialect: Dialect) -> None:
    for _, data in wires.read_events(dialect.ping + dialect.ping):
        assert data["type"] in ("ping", "keepalive")


@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize(
    "failure", [BadRequest("no", "stop"), ContextExceeded("long", "messages", tokens=7, limit=5), NoEngineOpen("shut")]
)
def test_errors_are_unchanged_by_pickling(dialect: Dialect, failure: WireError) -> None:
    copy = pickle.loads(pickle.dumps(failure))
    assert type(copy) is type(failure)
    assert dialect.error(copy) == dialect.error(failure)


@pytest.mark.parametrize("dialect", WIRES)
@pytest.mark.parametrize(("tokens", "said"), [(70, "70"), (None, "61"), (60, "61")])
def test_context_exceeded_never_reports_a_length_that_fits(dialect: Dialect, tokens: int | None, said: str) -> None:
    message = str(dialect.error(ContextExceeded("long", tokens=tokens, limit=60)))
    assert f"{said} tokens" in message
    assert "60" in message
