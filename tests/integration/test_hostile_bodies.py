"""Bodies of a hostile session that are legal JSON and take long: they are refused, and other sessions go on."""

from __future__ import annotations

import asyncio
import gc
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.serve.gateway.capture.session import Budgets
from support.gateway_rig import ANTHROPIC, CHAT, RESPONSES, WIRES, Wire, world
from support.scripted_engine import check_exact

USER = {"role": "user", "content": "go"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
MANY = 20_000


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


def anthropic(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 9, "messages": [USER], **fields}).encode()


def responses(**fields: Any) -> bytes:
    return json.dumps({"input": [{"role": "user", "content": "go"}], **fields}).encode()


@pytest.mark.parametrize(
    ("wire", "body", "cap"),
    [
        (CHAT, chat(messages=[USER] * MANY), "messages: a request may have at most 4096"),
        (CHAT, chat(messages=[{"role": "assistant", "tool_calls": [CALL] * MANY}]), "tool_calls: a request may have"),
        (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}] * MANY}]), "parts of messages: a request"),
        (CHAT, chat(tools=[{"function": {"name": "f"}}] * MANY), "tools: a request may have at most 1024"),
        (ANTHROPIC, anthropic(messages=[USER] * MANY), "messages: a request may have at most 4096"),
        (ANTHROPIC, anthropic(messages=[{"role": "assistant", "content": [USE] * MANY}]), "parts of messages"),
        (ANTHROPIC, anthropic(system=[{"type": "text", "text": "x"}] * MANY), "parts of system"),
        (
            ANTHROPIC,
            anthropic(messages=[{"role": "user", "content": [{"type": "tool_result", "content": [USE] * MANY}]}]),
            "parts of messages",
        ),
        (RESPONSES, responses(input=[{"type": "function_call"}] * MANY), "input: a request may have at most 4096"),
        (RESPONSES, responses(tools=[{"type": "namespace", "name": "n", "tools": [{}] * MANY}]), "tools: a request"),
        (CHAT, b'{"messages": [' + b",".join([b"{}"] * 1_100_000) + b"]}", "at most 1000000 objects and lists"),
    ],
    ids=range(11),
)
async def test_more_than_any_agent_sends_is_refused_by_the_name_of_the_cap(
    model_dir: Path, wire: Wire, body: bytes, cap: str
) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire)
        refused = await client.send(body)
        assert refused.status == 400
        assert cap in refused.error["message"]
        assert (await client.say("go")).status == 200
        assert not (await w.finish()).failures


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
async def test_other_sessions_take_turns_while_large_bodies_are_read_and_rendered(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, in_processes=True, max_context_tokens=32768) as w:
        hostile = await w.client(CHAT, "hostile", tools=("bash",))
        other = await w.client(wire, tools=("bash",))
        nested = json.dumps([[[[0]]]] * 150_000)
        calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": nested}}]
        body = hostile.body(messages=[USER, {"role": "assistant", "tool_calls": calls}, USER])
        async with asyncio.TaskGroup() as group:
            attacks = [group.create_task(hostile.send(body)) for _ in range(6)]
            turns = 0
            while not all(attack.done() for attack in attacks):
                assert (await other.say(f"turn {turns}")).status == 200
                turns += 1
                if turns == 40:
                    break
        assert {attack.result().status for attack in attacks} == {400}
        assert turns > 1, "turns end before the attack does"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.failures) == (turns, ())


async def test_a_request_that_exceeds_its_rendering_time_is_refused_and_the_next_one_served(model_dir: Path) -> None:
    async with world(model_dir, in_processes=True, render_cpu_s=0.3) as w:
        client = await w.client(tools=("bash",), spec={"budgets": Budgets(max_context_tokens=10**6)})
        refused = await client.say(" ".join(f"word{number}" for number in range(900_000)))
        assert refused.status == 400
        assert "to render" in refused.error["message"]
        client.history.clear()
        assert (await client.say("go")).status == 200
        assert not (await w.finish()).failures


async def test_a_refused_body_is_gone_without_a_collection(model_dir: Path) -> None:
    """A gateway collects all its objects every ten minutes only: a cycle would keep each refused body until then."""
    async with world(model_dir) as w:
        client = await w.client()
        body = b'{"messages": [' + b",".join([b"{}"] * 1_100_000) + b"]}"
        assert (await client.send(body)).status == 400
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert (await client.send(body)).status == 400
            kept = sum(type(each) is bytes and len(each) == len(body) and each is not body for each in referents())
        finally:
            gc.enable()
        assert kept == 0


def referents() -> Iterator[object]:
    """What the local variables of all frames that tracebacks keep refer to."""
    for each in gc.get_objects():
        # Not isinstance: some objects of libraries warn when they are asked for their class.
        if type(each) is types.FrameType:
            yield from each.f_locals.values()
