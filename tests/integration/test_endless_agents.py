"""Agents that leave their turns or repeat refused requests for ever reach the end of their budget."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.serve.gateway.capture.events import Exhausted
from headrace.serve.gateway.capture.session import FINAL_TEXT, Budgets
from headrace.serve.gateway.http.turns import FRUITLESS_PER_TURN
from support.gateway_rig import CHAT, Client, Lines, World, soon, world
from support.scripted_engine import Fault

FORM = {"response_format": {"type": "json_object"}}


async def leave(w: World, client: Client, text: str) -> None:
    """Send a request, and disconnect when its engine samples."""
    [engine] = w.engines
    engine.asked.clear()
    sent = len(engine.requests)
    async with asyncio.TaskGroup() as group:
        turn = group.create_task(client.send(client.body() | {"messages": CHAT.user(text)}))
        while len(engine.requests) == sent:
            engine.asked.clear()
            await soon(engine.asked)
        turn.cancel()
    await soon(engine.aborted[engine.requests[-1]["rid"]])


@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
async def test_an_agent_that_leaves_every_turn_uses_up_its_turns(model_dir: Path, tmp_path: Path, same: bool) -> None:
    async with world(model_dir, Lines(Fault.HANG), session_log_dir=tmp_path) as w:
        client = await w.client(spec={"budgets": Budgets(max_turns=3)})
        for number in range(3):
            await leave(w, client, "go" if same else f"go {number}")
        reply = await client.send(client.body() | {"messages": CHAT.user("go")})
        assert reply.text == FINAL_TEXT
        assert len(w.engines[0].requests) == 3
        report = await w.finish()
        assert (report.turns, report.exhausted, report.masked, report.failures) == (
            0,
            Exhausted.TURNS,
            {"aborted": 3},
            (),
        )


@pytest.mark.parametrize("fields", [FORM, {"messages": CHAT.user("long " * 500)}], ids=["refused", "too long"])
async def test_an_agent_that_repeats_a_refused_request_gets_the_final_answer(
    model_dir: Path, fields: dict[str, Any]
) -> None:
    async with world(model_dir, Lines(Fault.GRAMMAR_REFUSED)) as w:
        client = await w.client(spec={"budgets": Budgets(max_turns=2, max_context_tokens=300)})
        body = client.body() | {"messages": CHAT.user("go")} | fields
        for _ in range(2 * FRUITLESS_PER_TURN - 1):
            assert (await client.send(body)).status == 400
        assert (await client.send(client.body() | {"messages": CHAT.user("go")})).text == "free", "a few are allowed"
        assert (await client.send(body)).status == 400
        asked = len(w.engines[0].requests)
        assert (await client.send(body)).text == FINAL_TEXT
        assert len(w.engines[0].requests) == asked
        report = await w.finish()
        assert (report.turns, report.failures) == (1, ())
        assert report.exhausted in (Exhausted.TURNS, Exhausted.CONTEXT)
