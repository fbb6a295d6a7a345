"""Invalid requests of agents are refused in the form of their API, use no budget and do not mark the session."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.gateway_rig import ANTHROPIC, CHAT, RESPONSES, WIRES, Client, Wire, world
from support.wires import read_refusal

PNG = "iVBORw0KGgo="
EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


NO_JSON = [b"", b"{", b'{"messages": [}', b"\xff\xfe", b'{"max_tokens": NaN}', b'"\\ud800"', b"[" * 2000, b"{} {}"]
NO_OBJECT = [b"null", b"[]", b"7", b'"x"']
LIMITS = [0, -1, 1.5, "9", True, [], 10**400]
CASES: dict[Wire, list[tuple[dict[str, Any], str]]] = {
    ANTHROPIC: [
        ({"messages": []}, "messages must contain at least one message."),
        ({"messages": None}, "messages must contain at least one message."),
        ({"messages": "go"}, "messages must be a list."),
        ({"messages": ["go"]}, "messages[0] must be an object."),
        (
            {"messages": [{"role": "wizard", "content": "go"}]},
            "messages[0].role must be one of assistant, ",
        ),
        ({"messages": [{"content": "go"}]}, "messages[0].role must be one of"),
        ({"messages": [*user("go"), {"role": "assistant", "content": "I"}]}, "an answer cannot be prefilled"),
        ({"messages": user(7)}, "messages[0].content must be a string or a list of parts."),
        ({"messages": user([{"type": "image", "source": {"type": "base64", "data": PNG}}])}, "reads text only"),
        ({"messages": user([{"type": "document", "source": {"type": "url", "url": "x"}}])}, "reads text only"),
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice forces a call, but the request has no tools."),
        ({"tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice: the request has no tool 'rm'."),
        ({"tool_choice": "auto"}, "tool_choice must be an object."),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name must be the name of the tool."),
        ({"tools": {"name": "bash"}}, "tools must be a list."),
        ({"stop_sequences": 5}, "stop_sequences must be a string or a list"),
        ({"stop_sequences": [5]}, "a stop string must have 1 to 256 characters"),
        ({"stop_sequences": [""]}, "a stop string must have 1 to 256 characters"),
        ({"stop_sequences": ["x" * 257]}, "a stop string must have 1 to 256 characters"),
        ({"stop_sequences": ["x"] * 17}, "a list of at most 16 strings"),
        ({"stream": "yes"}, "stream must be true or false."),
        ({"model": 7}, "model must be a string."),
    ],
    CHAT: [
        ({"messages": []}, "messages must contain at least one message."),
        ({"messages": [{"role": "wizard", "content": "go"}]}, "messages[0].role must be one of"),
        ({"messages": [*user("go"), {"role": "assistant", "content": "I"}]}, "an answer cannot be prefilled"),
        ({"messages": user([{"type": "image_url", "image_url": {"url": "data:,"}}])}, "reads text only"),
        ({"messages": user([{"type": "input_audio", "input_audio": {"data": PNG}}])}, "reads text only"),
        ({"tool_choice": "required", "tools": []}, "tool_choice forces a call, but the request has no tools."),
        ({"tool_choice": {"type": "function", "function": {"name": "rm"}}}, "the request has no tool 'rm'."),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema must be an object."),
        ({"tools": [{"type": "function", "function": 5}]}, "tools[0].function must be an object."),
        ({"n": 17}, "n must be a whole number from 1 to 16."),
        ({"n": "1"}, "n must be a whole number from 1 to 16."),
        ({"stop": 5}, "stop must be a string or a list"),
        ({"stop": {"a": 1}}, "stop must be a string or a list"),
        ({"stop": ["a", None]}, "a stop string must have 1 to 256 characters"),
        ({"stream": 1}, "stream must be true or false."),
    ],
    RESPONSES: [
        ({"input": [], "instructions": None}, "input must contain at least one message."),
        ({"input": 7}, "input must be a"),
        ({"input": [{"role": "wizard", "content": "go"}]}, "input[0].role must be one of"),
        ({"input": user([{"type": "input_image", "image_url": "data:,"}])}, "reads text only"),
        ({"input": user([{"type": "input_file", "file_id": "f"}])}, "reads text only"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, "items are not stored here; send the item itself."),
        ({"tool_choice": "required", "tools": []}, "tool_choice forces a call, but the request has no tools."),
        ({"tool_choice": {"type": "function", "name": "rm"}}, "tool_choice: the request has no tool 'rm'."),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema must be an object."),
        ({"previous_response_id": "resp_1"}, "responses are not stored here; send the whole conversation."),
        ({"conversation": "c"}, "conversations are not stored here"),
        ({"background": True}, "wait for the answer, or stream it."),
        ({"stream": []}, "stream must be true or false."),
    ],
}


def spelled() -> list[Any]:
    return [
        pytest.param(wire, body, sentence, id=f"{wire.name}-{number}")
        for wire, cases in CASES.items()
        for number, (body, sentence) in enumerate(cases)
    ]


async def refused(client: Client, body: bytes, status: int = 400) -> str:
    reply = await client.send(body)
    assert reply.status == status, reply.raw
    return read_refusal(client.wire.name, json.loads(reply.raw))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("wire", "fields", "sentence"), spelled())
async def test_unsupported_parameters_are_refused_with_a_clear_message(
    model_dir: Path, wire: Wire, fields: dict[str, Any], sentence: str, stream: bool
) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire, tools=("bash",))
        client.history += wire.user("go")
        assert sentence in await refused(client, json.dumps(client.body(stream=stream) | fields).encode())
        assert w.engines[0].requests == []
        assert (await client.send(client.body())).status == 200
        report = await w.finish()
        assert (report.turns, report.failures, report.exhausted) == (1, (), "")


@EVERY
async def test_bodies_that_are_not_json_objects_are_refused(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire)
        for body in NO_JSON:
            assert "not valid JSON" in await refused(client, body)
        for body in NO_OBJECT:
            assert await refused(client, body) == "The body must be a JSON object."
        assert (await client.say("go")).status == 200
        assert (await w.finish()).failures == ()


@EVERY
async def test_invalid_limits_are_refused(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire)
        client.history += wire.user("go")
        for limit in LIMITS:
            sentence = await refused(client, json.dumps(client.body(**{wire.limit_field: limit})).encode())
            assert f"{wire.limit_field} must be a whole number of at least 1." in sentence or "JSON" in sentence
        assert (await client.send(client.body(**{wire.limit_field: 2**63}))).status == 200


# Bodies of many bytes.

MOST = 2**20
TOO_LARGE = {"anthropic": 413, "chat": 413, "responses": 400}


def filled(client: Client, size: int) -> bytes:
    """Return a valid body of exactly this number of bytes."""
    least = len(json.dumps(client.body(padding="")))
    return json.dumps(client.body(padding="x" * (size - least))).encode()


async def in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), 2**16):
        yield body[start : start + 2**16]


@EVERY
@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "in chunks"])
async def test_a_body_at_the_size_limit_is_accepted_and_a_larger_one_refused(
    model_dir: Path, wire: Wire, chunked: bool
) -> None:
    async with world(model_dir, max_body_bytes=MOST) as w:
        client = await w.client(wire)
        client.history += wire.user("go")
        for size, status in ((MOST, 200), (MOST + 1, TOO_LARGE[wire.name])):
            body = filled(client, size)
            assert len(body) == size
            data = in_pieces(body) if chunked else io.BytesIO(body)
            async with w.http.post(client.base_url + wire.path, data=data) as response:
                assert response.status == status
                document = await response.json()
        assert f"larger than {MOST} bytes" in read_refusal(wire.name, document)
        assert (await w.finish()).failures == ()


@EVERY
@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "in chunks"])
async def test_a_body_of_64_megabytes_is_refused(model_dir: Path, wire: Wire, chunked: bool) -> None:
    """Uses the default limit, and a client that sends everything before it reads."""
    async with world(model_dir) as w:
        client = await w.client(wire)
        body = b'{"messages": [{"role": "user", "content": "' + b"x" * 2**26
        data = in_pieces(body) if chunked else io.BytesIO(body)
        async with w.http.post(client.base_url + wire.path, data=data) as response:
            assert response.status == TOO_LARGE[wire.name]
            assert "larger than 16777216 bytes" in read_refusal(wire.name, await response.json())
        assert (await client.say("go")).status == 200
        assert (await w.finish()).failures == ()
