"""Engines with invalid answers: an infra failure, no trained token, and the next turn works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.policies.engine import EngineId
from headrace.serve.gateway.capture.session import Budgets
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from support.gateway_rig import GUARD_S, Engine, Lines, World, world
from support.scripted_engine import check_exact

SAID = "words of some length"


@dataclass(kw_only=True)
class LyingEngine(Engine):
    """Engine whose `lie` changes an answer and its `meta_info`, in place or by returning another; None for valid
    answers."""

    lie: Callable[[dict[str, Any], dict[str, Any]], Any] | None = None

    def _reply(
        self, body: dict[str, Any], prompt: str, text: str, ids: list[int], finish: Mapping[str, Any]
    ) -> web.Response:
        reply = super()._reply(body, prompt, text, ids, finish)
        if self.lie is None:
            return reply
        self.sampled.pop()
        assert isinstance(reply.body, bytes)
        document = json.loads(reply.body)
        other = self.lie(document, document["meta_info"])
        given = document if other is None else other
        return web.Response(body=given if isinstance(given, bytes) else json.dumps(given).encode())


def _ids(change: Callable[[list[Any]], list[Any]]) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    """Another list of ids, with as many log-probabilities and a span over all."""

    def lie(document: dict[str, Any], meta: dict[str, Any]) -> None:
        ids = document["output_ids"] = change(document["output_ids"])
        meta["output_token_logprobs"] = [[-0.25, token, None] for token in ids]
        meta["weight_versions"] = [{"version": "1.4", "start": 0, "end": len(ids)}] if ids else []
        meta["completion_tokens"] = len(ids)

    return lie


def _meta(**fields: Any) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    return lambda _document, meta: meta.update(fields)


def _spans(*edges: tuple[int, int]) -> Callable[[dict[str, Any], dict[str, Any]], Any]:
    return _meta(weight_versions=[{"version": "1.4", "start": start, "end": end} for start, end in edges])


def _first_logprob(text: str) -> Callable[[dict[str, Any], dict[str, Any]], bytes]:
    """The first log-probability in another spelling, which may be none of JSON."""

    def lie(document: dict[str, Any], meta: dict[str, Any]) -> bytes:
        meta["output_token_logprobs"][0][0] = "the first"
        return json.dumps(document).replace('"the first"', text).encode()

    return lie


LIES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "no JSON": lambda *_: b"<html>",
    "nothing": lambda *_: b"",
    "a list": lambda *_: [],
    "no UTF-8": lambda *_: b"\xff\xfe",
    "no meta_info": lambda document, _: {**document, "meta_info": None},
    "no ids": lambda document, _: {**document, "output_ids": None},
    "ids as text": _ids(lambda ids: [str(token) for token in ids]),
    "ids as fractions": _ids(lambda ids: [token + 0.5 for token in ids]),
    "ids as truth": _ids(lambda ids: [True for _ in ids]),
    "an id below 0": _ids(lambda ids: [-1, *ids[1:]]),
    "an id outside of the vocabulary": _ids(lambda ids: [10**6, *ids[1:]]),
    "an id of 64 bits": _ids(lambda ids: [2**40, *ids[1:]]),
    "more than was asked for": _ids(lambda ids: ids * 50),
    "no token and an end": _ids(lambda _: []),
    "a log-probability too few": lambda _, meta: meta["output_token_logprobs"].pop() and None,
    "no log-probabilities": _meta(output_token_logprobs=None),
    "log-probabilities that are none": _first_logprob("NaN"),
    "log-probabilities that are null": _first_logprob("null"),
    "log-probabilities without ids": lambda document, meta: meta.update(
        output_token_logprobs=[-0.25 for _ in document["output_ids"]]
    ),
    "no weight version": lambda _, meta: meta.pop("weight_versions") and None,
    "another's weight version": _meta(weight_versions=[{"version": "default", "start": 0, "end": 4}]),
    "a span too short": _spans((0, 1)),
    "spans that overlap": _spans((0, 3), (2, 5)),
    "a span backwards": lambda document, meta: _spans((0, 99), (99, len(document["output_ids"])))(document, meta),
    "no reason of the end": _meta(finish_reason=None),
    "an unknown reason of the end": _meta(finish_reason={"type": "magic"}),
    "counts as text": _meta(cached_tokens="many"),
    "no text": lambda document, _: {**document, "text": None},
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_invalid_engine_answer_is_an_infra_failure(model_dir: Path, lie: str) -> None:
    budgets = Budgets(max_tokens_per_turn=32)
    async with world(model_dir, Lines(SAID), engine_type=LyingEngine) as w:
        [engine] = w.engines
        assert isinstance(engine, LyingEngine)
        client = await w.client(spec={"budgets": budgets})
        await client.say("go")
        engine.lie = LIES[lie]
        reply = await client.say("on")
        assert (reply.status, reply.error["code"]) == (503, "engine_failed"), reply.raw
        engine.lie = None
        assert (await client.send(client.body())).text == SAID
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked, len(report.failures)) == (2, {}, 1)
        assert len(engine.requests) == 4, "it was asked twice before the agent was told"


# Engines that do not answer.


async def silent(w: World) -> asyncio.Server:
    """Server in place of the engine that accepts every connection and never answers."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    route = EngineRoute(engine_id=EngineId("silent"), url=f"http://127.0.0.1:{port}")
    assert await w.gateway.set_engines(RoutingTable(version=2, engines=(route,)))
    return server


async def test_an_engine_that_never_responds_fails_the_turn_at_its_deadline(model_dir: Path) -> None:
    """The engine does not answer the abort of the turn either."""
    async with world(model_dir, turn_timeout_s=0.2, abort_grace_s=0.1) as w, await silent(w):
        client = await w.client()
        reply = await client.say("go")
        assert (reply.status, reply.error["code"]) == (503, "engine_failed")
        report = await w.finish()
        assert (report.turns, report.sampled_tokens, len(report.failures)) == (0, 0, 1)
        assert (await w.gateway.in_flight()).turns_in_flight == {}


async def test_an_engine_that_never_answers_does_not_delay_the_end_of_its_sessions(model_dir: Path) -> None:
    budgets = Budgets(wall_s=2, final_text="over")
    async with world(model_dir, abort_grace_s=0.1, held_after_s=0.01) as w, await silent(w):
        walled = await w.client(spec={"budgets": budgets})
        assert (await walled.say("go")).text == "over"
        report = await w.finish()
        assert (report.exhausted, len(report.failures)) == ("wall", 1)
        other = await w.client(session_id="rollout-2")
        async with asyncio.timeout(GUARD_S), asyncio.TaskGroup() as group:
            turn = group.create_task(other.say("go"))
            while (await w.gateway.in_flight()).turns_in_flight == {}:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.01)
            report = await w.finish("rollout-2")
        assert (turn.result().status, report.turns) == (400, 0)
