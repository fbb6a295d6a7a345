"""Delivery of answers: turns are buffered, sent once, replayed when lost, and aborted when nobody waits."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.serve.gateway.capture.session import Budgets
from support.chat_templates import DEEPSEEK3_LEAKY, LONG
from support.gateway_rig import (
    ANTHROPIC,
    CHAT,
    GUARD_S,
    RESET,
    WIRES,
    Client,
    Lines,
    Reply,
    Wire,
    World,
    address_of,
    deaf,
    request_bytes,
    soon,
    until,
    world,
)
from support.scripted_engine import Fault, check_exact
from support.session_rig import ByteChat

PATIENT = {"ping_s": 60.0}
RETRIED = {"x-stainless-retry-count": "1"}
"""No ping comes: what happens, happens for another reason."""
HASTY = {"ping_s": 0.05}
EITHER = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)


@asynccontextmanager
async def asked(w: World, client: Client, text: str) -> AsyncIterator[tuple[asyncio.StreamReader, Any]]:
    """Send a request on a connection of its own, without reading the answer."""
    body = json.dumps(client.wire.body(client.wire.user(text), client.tools, client.system) | {"stream": client.stream})
    path = client.base_url.removeprefix(w.url) + client.wire.path
    reader, writer = await asyncio.open_connection(*address_of(w.url))
    try:
        writer.write(request_bytes(path, body.encode()))
        await writer.drain()
        yield reader, writer
    finally:
        writer.close()


async def read_until(reader: asyncio.StreamReader, mark: bytes) -> bytes:
    async with asyncio.timeout(GUARD_S):
        return await reader.readuntil(mark)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """Read the rest of the body until its regular end."""
    return await read_until(reader, b"\r\n0\r\n\r\n")


def only_log(folder: Path) -> bytes:
    [log] = folder.glob("*.jsonl")
    return log.read_bytes()


# Held whole.


@EVERY
async def test_a_waiting_stream_gets_pings_and_no_content(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, Lines("the content"), **HASTY) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(wire, stream=True)
        async with asked(w, client, "go") as (reader, _):
            seen = b""
            for _ in range(3):
                seen += await read_until(reader, wire.ping)
            assert seen.startswith(b"HTTP/1.1 200")
            assert b"text/event-stream" in seen
            body = seen.split(b"\r\n\r\n", 1)[1]
            events = [line for line in body.split(b"\n") if line.startswith((b"event:", b"data:", b":"))]
            assert all(wire.ping in line or b"ping" in line or b"keepalive" in line for line in events), events
            assert engine.sampled == []
            engine.may_answer.set()
            assert wire.terminator in await rest_of(reader)
        assert len(engine.sampled) == 1


@EVERY
async def test_an_answer_without_pings_is_sent_in_one_write(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, **PATIENT) as w:
        client = await w.client(wire, stream=True)
        reply = await client.say("go")
        assert wire.ping not in reply.raw
        assert reply.text == "ls"


# Failures.

STATUSES = {"anthropic": 529, "chat": 503, "responses": 503}


@EVERY
@EITHER
async def test_a_failure_before_the_first_ping_has_the_dialects_status(
    model_dir: Path, wire: Wire, stream: bool
) -> None:
    async with world(model_dir, Lines(Fault.ERROR, Fault.ERROR, "fine"), **PATIENT) as w:
        client = await w.client(wire, stream=stream)
        reply = await client.say("go")
        assert reply.status == STATUSES[wire.name]
        assert reply.error["type"] in ("overloaded_error", "server_error")
        assert (await client.send(client.body())).text == "fine"
        report = await w.finish()
        assert len(report.failures) == 1
        assert report.failures[0].startswith("engine_failed")


@EVERY
async def test_a_failure_after_a_ping_sends_an_error_event_and_ends_the_stream_cleanly(
    model_dir: Path, wire: Wire
) -> None:
    async with world(model_dir, Lines(Fault.ERROR), **HASTY) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(wire, stream=True)
        async with asked(w, client, "go") as (reader, _):
            await read_until(reader, wire.ping)
            engine.may_answer.set()
            told = await rest_of(reader)
        assert wire.terminator not in told
        assert {"anthropic": b"event: error", "chat": b'"server_error"', "responses": b"event: response.failed"}[
            wire.name
        ] in told
        assert len((await w.finish()).failures) == 1


async def test_a_session_is_marked_before_the_failure_is_sent(model_dir: Path, tmp_path: Path) -> None:
    """The mark is in the log when the first byte arrives; the file is read without a call to the gateway."""
    async with world(model_dir, Lines(Fault.ERROR), session_log_dir=tmp_path, **PATIENT) as w:
        client = await w.client()
        async with asked(w, client, "go") as (reader, _):
            async with asyncio.timeout(GUARD_S):
                await reader.readexactly(1)
            assert b'{"failed":"engine_failed' in only_log(tmp_path)


class BrokenDecoder(ByteChat):
    """Renderer with a bug: sampled ids cannot be decoded."""

    def decode(self, ids: Sequence[int]) -> str:
        raise RuntimeError("a defect")


@EVERY
async def test_an_internal_error_after_a_ping_sends_an_error_event(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, Lines(""), renderer=BrokenDecoder(), vocab_size=512, **HASTY) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(wire, stream=True)
        async with asked(w, client, "go") as (reader, _):
            head = await read_until(reader, wire.ping)
            engine.may_answer.set()
            told = head + await rest_of(reader)
        assert told.count(b"HTTP/1.1") == 1
        assert wire.terminator not in told
        assert (await w.finish()).failures[0].startswith("gateway_error")


# Nobody waits any more.


@EITHER
async def test_a_client_that_disconnects_ends_its_turn_at_once(model_dir: Path, stream: bool) -> None:
    async with world(model_dir, Lines(Fault.HANG, "later"), **PATIENT) as w:
        [engine] = w.engines
        client = await w.client(stream=stream)
        async with asked(w, client, "go"):
            await soon(engine.asked)
        await soon(engine.aborted[engine.requests[0]["rid"]])
        assert (await client.say("again")).text == "later"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked, report.failures) == (1, {"aborted": 1}, ())
        assert (await w.gateway.in_flight()).turns_in_flight == {}


async def test_a_client_that_disconnects_between_pings_ends_its_turn_before_the_next(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.HANG), ping_s=0.3) as w:
        [engine] = w.engines
        client = await w.client(ANTHROPIC, stream=True)
        async with asked(w, client, "go") as (reader, _):
            await read_until(reader, b"event: ping")
        await soon(engine.aborted[engine.requests[0]["rid"]])
        assert (await w.finish()).masked == {"aborted": 1}


async def test_a_connection_reset_counts_as_a_disconnected_client(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.HANG), **PATIENT) as w:
        [engine] = w.engines
        async with asked(w, await w.client(), "go") as (_, writer):
            await soon(engine.asked)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()
        await soon(engine.aborted[engine.requests[0]["rid"]])
        assert (await w.finish()).masked == {"aborted": 1}


async def test_partial_tokens_are_recorded_when_the_session_finishes_as_its_agent_disconnects(model_dir: Path) -> None:
    """A worker kills the agent and finishes the session in one go: the abort on the engine is under way, and is not
    broken off. Without its tokens the turn would look as if we had held it up."""
    async with world(model_dir, Lines(Fault.HANG), held_after_s=0.01, abort_grace_s=10.0, **PATIENT) as w:
        [engine] = w.engines
        engine.may_abort.clear()
        async with asked(w, await w.client(), "go"):
            await soon(engine.asked)
        await soon(engine.abort_asked)
        async with asyncio.TaskGroup() as group:
            finishing = group.create_task(w.finish())
            async with w.http.get(f"{w.url}/healthz") as response:
                assert response.status == 200, "the gateway has read the request before this one"
            engine.may_abort.set()
        report = finishing.result()
        assert (report.masked, report.failures) == ({"aborted": 1}, ())


# One turn, however often it is asked.


async def test_equal_requests_in_flight_are_samples_of_their_own(model_dir: Path) -> None:
    async with world(model_dir, Lines("one", "two", "three"), **PATIENT) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(ANTHROPIC)
        body = client.body(messages=client.wire.user("go"))
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(client.send(body | {"stream": stream})) for stream in (True, False, True)]
            await until(lambda: engine.running == 3)
            engine.may_answer.set()
        assert {one.result().text for one in asking} == {"one", "two", "three"}
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.replays) == (3, 0)


@EITHER
async def test_n_answers_are_n_samples_of_which_the_continued_one_is_trained(model_dir: Path, stream: bool) -> None:
    async with world(model_dir, Lines("one", "two", "three", "and on"), **PATIENT) as w:
        [engine] = w.engines
        client = await w.client(CHAT)
        body = client.body(messages=client.wire.user("go")) | {
            "n": 3,
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
        async with w.http.post(client.base_url + client.wire.path, json=body) as response:
            raw = await response.read()
        assert response.status == 200, raw
        texts, usage = texts_by_choice(raw, stream=stream)
        assert sorted(texts.values()) == ["one", "three", "two"]
        assert usage["completion_tokens"] == sum(len(one.output_ids) for one in engine.sampled)
        assert usage["prompt_tokens"] == len(engine.requests[0]["input_ids"])
        history = [*client.wire.user("go"), {"role": "assistant", "content": texts[1]}, *client.wire.user("more")]
        assert (await client.send(client.body(messages=history))).text == "and on"
        report = await w.finish()
        check_exact(report, w.engines)
        others = sum(len(one.output_ids) for one in engine.sampled if one.text in (texts[0], texts[2]))
        assert (report.turns, report.masked, report.replays) == (4, {"abandoned": others}, 0)


def texts_by_choice(raw: bytes, *, stream: bool) -> tuple[dict[int, str], dict[str, int]]:
    """The text of each choice by its index, and the usage."""
    if not stream:
        document = json.loads(raw)
        return {each["index"]: each["message"]["content"] for each in document["choices"]}, document["usage"]
    texts: dict[int, str] = {}
    usage: dict[str, int] = {}
    for line in raw.splitlines():
        if line.startswith(b"data: {"):
            document = json.loads(line[6:])
            usage = document["usage"] or usage
            for choice in document["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return texts, usage


async def test_retries_in_flight_share_one_turn_whatever_their_stream_flag(model_dir: Path) -> None:
    async with world(model_dir, Lines("once"), **PATIENT) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(ANTHROPIC)
        again = replace(client, headers=RETRIED)
        body = client.body(messages=client.wire.user("go"))
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(client.send(body | {"stream": True}))]
            await soon(engine.asked)
            asking += [group.create_task(again.send(body | {"stream": stream})) for stream in (False, True)]
            await all_here(w, asking)
            engine.may_answer.set()
        replies = [one.result() for one in asking]
        assert [reply.text for reply in replies] == ["once"] * 3
        assert replies[0].kept == replies[1].kept
        assert len(engine.requests) == 1
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked) == (1, {})


async def all_here(w: World, asking: Sequence[asyncio.Task[Reply]]) -> None:
    """Wait until the gateway has read all requests sent before, which it reads in order."""
    assert not any(task.done() for task in asking)
    for _ in range(3):
        async with w.http.get(f"{w.url}/healthz") as response:
            assert response.status == 200


async def test_a_turn_continues_for_a_second_client_when_the_first_disconnects(model_dir: Path) -> None:
    async with world(model_dir, Lines("kept"), **PATIENT) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(stream=True)
        async with asyncio.TaskGroup() as group:
            async with asked(w, client, "go"):
                await soon(engine.asked)
                second = group.create_task(replace(client, headers=RETRIED).say("go"))
                await all_here(w, [second])
            await all_here(w, [second])
            assert not any(event.is_set() for event in engine.aborted.values())
            engine.may_answer.set()
        assert second.result().text == "kept"
        report = await w.finish()
        assert (report.turns, report.masked, len(engine.requests)) == (1, {}, 1)


async def test_a_client_that_retries_while_its_turn_is_being_aborted_gets_an_answer(model_dir: Path) -> None:
    """The retry must not share the abort of the turn that the client just left."""
    async with world(model_dir, Lines(Fault.HANG, "second try"), abort_grace_s=10.0, **PATIENT) as w:
        [engine] = w.engines
        engine.may_abort.clear()
        client = await w.client()
        async with asked(w, client, "go"):
            await soon(engine.asked)
        await soon(engine.abort_asked)
        async with asyncio.TaskGroup() as group:
            again = group.create_task(client.say("go"))
            await all_here(w, [again])
            engine.may_abort.set()
        assert again.result().text == "second try"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked) == (1, {"aborted": 1})


@EITHER
async def test_an_answer_is_replayed_if_its_last_byte_was_not_sent(fat_dir: Path, stream: bool) -> None:
    budgets = Budgets(max_tokens_per_turn=10**6, max_context_tokens=2 * 10**6)
    async with world(fat_dir, Lines(LONG * 24_000, "sampled again"), **PATIENT) as w:
        [engine] = w.engines
        client = await w.client(CHAT, stream=stream, system="", spec={"budgets": budgets})
        for _ in range(4):
            async with deaf(client, client.body(messages=client.wire.user("go"))):
                pass
        assert (await client.say("go")).text == LONG * 24_000
        assert len(engine.requests) == 1, "nothing says that it arrived: it is replayed however often it is lost"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked, report.replays) == (1, {}, 4)


@EITHER
async def test_an_equal_request_after_a_sent_answer_is_another_sample(model_dir: Path, stream: bool) -> None:
    async with world(model_dir, Lines("first", "second", "third"), **PATIENT) as w:
        client = await w.client(stream=stream)
        body = client.body(messages=client.wire.user("go"))
        assert [(await client.send(body)).text for _ in range(3)] == ["first", "second", "third"]
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, set(report.masked), report.replays) == (3, {"abandoned"}, 0)


@pytest.mark.parametrize("headers", [RETRIED, {"Idempotency-Key": "stainless-python-retry-7"}], ids=["count", "key"])
async def test_a_sent_answer_is_replayed_to_a_request_that_says_that_it_repeats(
    model_dir: Path, headers: dict[str, str]
) -> None:
    async with world(model_dir, Lines("first", "second"), **PATIENT) as w:
        first = await w.client(headers={**headers, "x-stainless-retry-count": "0"})
        body = first.body(messages=first.wire.user("go"))
        again = replace(first, headers=headers)
        replies = [await client.send(body) for client in (first, again, again)]
        assert [reply.text for reply in replies] == ["first"] * 3
        assert len({json.dumps(reply.kept) for reply in replies}) == 1
        changed = await again.send(body | {"temperature": 0.5})
        assert changed.text == "second", "who changes how it is sampled wants another answer"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.replays) == (2, 2)


@pytest.mark.parametrize("headers", [RETRIED, {"Idempotency-Key": "stainless-python-retry-8"}], ids=["count", "key"])
async def test_a_retry_after_an_error_is_a_sample_of_its_own(model_dir: Path, headers: dict[str, str]) -> None:
    """An earlier, equal request had its answer, and is not the one that is repeated."""
    async with world(model_dir, Lines("first", Fault.ERROR, Fault.ERROR, "second"), **PATIENT) as w:
        client = await w.client()
        body = client.body(messages=client.wire.user("go"))
        assert (await client.send(body)).text == "first"
        failing = replace(client, headers={**headers, "x-stainless-retry-count": "0"})
        assert (await failing.send(body)).status >= 500
        again = replace(client, headers=headers)
        assert [(await again.send(body)).text for _ in range(2)] == ["second"] * 2, "and is replayed itself"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.replays, len(report.failures)) == (2, 1, 1)


async def test_a_replayed_answer_has_the_same_tokens_after_a_full_render(tmp_path: Path) -> None:
    """With templates without bridges every turn is a root of its own, and is still replayed."""
    folder = DEEPSEEK3_LEAKY.write(tmp_path)
    async with world(folder, Lines("one", "two", "three"), end=DEEPSEEK3_LEAKY.eos, parser="none", **PATIENT) as w:
        [engine] = w.engines
        client = await w.client()
        await client.say("first")
        await client.say("second")
        assert len(engine.requests) == 2
        lost = client.body(messages=client.body()["messages"][:-1])
        assert (await replace(client, headers=RETRIED).send(lost)).text == "two"
        assert len(engine.requests) == 2
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.rerendered, report.masked) == (2, 1, {})
