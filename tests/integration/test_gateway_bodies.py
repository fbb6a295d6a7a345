"""Request bodies: budgets of a session and of the gateway, deadlines, and bodies that nobody asked for."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace.serve.gateway.capture.session import Budgets
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.turns import MAX_RUNNING_TURNS
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
from support.gateway_rig import ANTHROPIC, CHAT, GUARD_S, WIRES, Client, Reply, Wire, World, until, world
from support.raw_http import RawConnection, head_of, raw_connection
from support.wires import read_refusal

EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
MOST = 2**16
KIB = 1024


def path_of(w: World, client: Client) -> str:
    return client.base_url.removeprefix(w.url) + client.wire.path


def unfinished(w: World, client: Client, sent: int, declared: int = MOST) -> bytes:
    """A request of whose body so many bytes are sent."""
    return head_of(path_of(w, client), f"Content-Length: {declared}") + b" " * sent


async def probe(client: Client) -> int:
    """Return the status of a small request that is no turn."""
    url = f"{client.base_url}/v1/tokenize"
    async with client.http.post(url, data=json.dumps({"prompt": "so few"}).encode()) as response:
        await response.read()
        return response.status


async def probed(client: Client, status: int) -> None:
    """Wait for the status of a small request, which must come at once."""
    async with asyncio.timeout(GUARD_S):
        while await probe(client) != status:
            pass


async def in_order(w: World) -> None:
    """Wait until the gateway has read what was sent before."""
    for _ in range(3):
        async with w.http.get(f"{w.url}/healthz") as response:
            assert response.status == 200


# The budget of a session.


@EVERY
async def test_bodies_over_the_sessions_budget_are_refused_and_other_sessions_are_not(
    model_dir: Path, wire: Wire
) -> None:
    async with world(model_dir, max_body_bytes=MOST) as w:
        client, other = await w.client(wire), await w.client(wire, session_id="other")
        async with raw_connection(w.url, unfinished(w, client, MOST - 1)):
            async with raw_connection(w.url, unfinished(w, client, MOST - 1)):
                await probed(client, 429)
                reply = await client.say("one more")
                assert reply.status == 429
                assert "131072 bytes together" in read_refusal(wire.name, json.loads(reply.raw), limited=True)
                assert (await other.say("go")).status == 200
            await probed(client, 200)
            assert (await client.say("again")).status == 200
        report = await w.finish()
        assert (report.turns, report.failures) == (1, ())


async def test_a_declared_length_counts_for_no_budget(model_dir: Path) -> None:
    async with world(model_dir, max_body_bytes=MOST, max_total_body_bytes=MOST) as w, AsyncExitStack() as stack:
        client = await w.client()
        for _ in range(10):
            await stack.enter_async_context(raw_connection(w.url, unfinished(w, client, 0)))
        await in_order(w)
        assert (await client.say("go")).status == 200


async def test_a_parsed_body_counts_no_longer(model_dir: Path) -> None:
    """The turns of these bodies run all at the same time."""
    async with world(model_dir, max_body_bytes=MOST) as w, asyncio.TaskGroup() as group:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client()
        padding = "x" * (MOST // 2)
        asking = [
            group.create_task(client.send(client.body(messages=client.wire.user(f"go {number}"), padding=padding)))
            for number in range(8)
        ]
        await until(lambda: engine.running == len(asking))
        engine.may_answer.set()
    assert {task.result().status for task in asking} == {200}


def test_a_session_may_have_one_body_at_least() -> None:
    assert GatewayConfig(max_body_bytes=2**20).session_body_bytes == 2**21


# The budget of the gateway.


async def test_a_body_waits_for_room_in_the_gateway(model_dir: Path) -> None:
    async with world(model_dir, max_total_body_bytes=4 * KIB) as w, asyncio.TaskGroup() as group:
        one, two, client = [await w.client(session_id=name) for name in ("one", "two", "three")]
        async with raw_connection(w.url, unfinished(w, one, 4 * KIB)):
            await in_order(w)
            # The one body that may go beyond the budget.
            async with raw_connection(w.url, unfinished(w, two, 1)):
                await in_order(w)
                asking = group.create_task(client.say("go"))
                await in_order(w)
                assert not asking.done()
                assert w.engines[0].requests == []
            assert (await asking).status == 200


@EVERY
async def test_a_body_without_room_until_its_deadline_is_an_infra_failure(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, max_total_body_bytes=KIB, body_timeout_s=0.3) as w, asyncio.TaskGroup() as group:
        first, small = [await w.client(session_id=name) for name in ("first", "small")]
        client = await w.client(wire)
        async with raw_connection(w.url, unfinished(w, first, 2 * KIB)):
            await in_order(w)
            asking = group.create_task(client.send(b" " * 4 * KIB))
            await in_order(w)
            # It waits as well, and its session holds less.
            async with raw_connection(w.url, unfinished(w, small, 2 * KIB)):
                reply = await asking
        assert reply.status == {"anthropic": 529}.get(wire.name, 503)
        report = await w.finish()
        assert [failure.partition(":")[0] for failure in report.failures] == ["gateway_busy"]


async def test_spans_of_an_agent_without_room_are_refused_and_its_rollout_counts(
    model_dir: Path, tmp_path: Path
) -> None:
    """Its answers do not depend on them, so nothing of ours failed that the rollout needs."""
    telemetry = configure(TelemetryConfig(), process="gateway", spans_dir=tmp_path, install=False)
    traced = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
    budgets = {"max_total_body_bytes": KIB, "body_timeout_s": 0.3}
    async with world(model_dir, intake=telemetry.intake(), **budgets) as w:
        first, small = [await w.client(session_id=name) for name in ("first", "small")]
        base_url = await w.open(**traced)
        async with raw_connection(w.url, unfinished(w, first, 2 * KIB)):
            await in_order(w)
            asking = asyncio.ensure_future(w.http.post(f"{base_url}/v1/traces", data=b" " * 4 * KIB))
            await in_order(w)
            async with raw_connection(w.url, unfinished(w, small, 2 * KIB)):
                assert (await asking).status == 503
        async with w.http.post(f"{base_url}/v1/traces", json={"resourceSpans": [1, {}]}) as answer:
            assert (answer.status, await answer.json()) == (200, {})
        async with w.http.post(f"{base_url}/v1/traces", data=b"{") as answer:
            assert answer.status == 400
        assert (await w.finish()).failures == ()
    telemetry.shutdown()


# Deadlines.


@EVERY
@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "in chunks"])
async def test_an_unfinished_body_is_refused_at_its_deadline_and_holds_nothing_after(
    model_dir: Path, wire: Wire, chunked: bool
) -> None:
    async with world(model_dir, max_body_bytes=MOST, body_timeout_s=0.1) as w:
        client = await w.client(wire)
        if chunked:
            begun = head_of(path_of(w, client), "Transfer-Encoding: chunked") + b"f000\r\n" + b" " * 0xF000 + b"\r\n"
        else:
            begun = unfinished(w, client, 0xF000)
        for _ in range(4):
            async with raw_connection(w.url, begun) as connection:
                answer = await connection.last_answer()
            assert answer.status == 408
            assert "within 0.1 s" in read_refusal(wire.name, answer.document)
        assert (await client.say("go")).status == 200
        assert (await w.finish()).failures == ()


async def test_an_unfinished_body_of_a_worker_is_refused_at_its_deadline(model_dir: Path) -> None:
    async with world(model_dir, body_timeout_s=0.1) as w:
        head = head_of("/sessions", "Content-Length: 100", "Authorization: Bearer an-admin-token-of-enough-letters")
        async with raw_connection(w.url, head + b"{") as connection:
            assert (await connection.answer()).status == 408


# Bodies that nobody asked for.


async def pour(connection: RawConnection, most_bytes: int) -> int:
    """Send chunks until the connection ends; return the number of bytes."""
    chunk = b"10000\r\n" + b"x" * 2**16 + b"\r\n"
    sent = 0
    while sent < most_bytes:
        try:
            await connection.send(chunk)
        except ConnectionError:
            break
        sent += len(chunk)
    return sent


@EVERY
async def test_a_body_of_an_unknown_session_is_refused_at_once_and_not_read(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        head = head_of(f"/s/nobodys{wire.path}", "Transfer-Encoding: chunked")
        async with raw_connection(w.url, head) as connection:
            answer = await connection.answer()
            assert (answer.status, answer.headers["connection"]) == (400, "close")
            read_refusal(wire.name, answer.document)
            async with asyncio.timeout(GUARD_S):
                assert await pour(connection, 2**26) < 2**25


async def test_a_stranger_who_sends_everything_before_it_reads_gets_its_refusal(model_dir: Path) -> None:
    async with world(model_dir) as w:
        stranger = Client(w.http, f"{w.url}/s/nobodys", CHAT)
        stranger.history += CHAT.user("x" * 2**19)
        reply = await stranger.send(stranger.body())
        assert (reply.status, reply.error["code"]) == (400, "unknown_session")


# Broken ones.


@EVERY
async def test_broken_encodings_are_refused_with_a_last_answer(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire)
        gzip = head_of(path_of(w, client), "Content-Encoding: gzip", "Content-Length: 20") + b"z" * 20
        chunks = head_of(path_of(w, client), "Transfer-Encoding: chunked") + b"5\r\n{   }\r\n"
        for pieces in ([gzip], [gzip[:-5], gzip[-5:]], [chunks, b"no number\r\n"], [chunks + b"no number\r\n"]):
            async with raw_connection(w.url, *pieces) as connection:
                answer = await connection.last_answer()
            assert (answer.version, answer.status) == ("HTTP/1.1", 400)
            assert read_refusal(wire.name, answer.document)
        assert (await client.say("go")).status == 200
        assert (await w.finish()).failures == ()


@EVERY
async def test_chunks_that_break_after_a_while_are_refused_at_once(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        head = head_of(path_of(w, await w.client(wire)), "Transfer-Encoding: chunked")
        async with raw_connection(w.url, head + b"5\r\n{   }\r\n") as connection:
            await in_order(w)
            await connection.send(b"no number\r\n")
            answer = await connection.last_answer()
        assert answer.status == 400
        assert "cannot be decoded" in read_refusal(wire.name, answer.document)
        assert (await w.finish()).failures == ()


async def test_broken_encodings_write_a_few_short_lines(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with world(model_dir) as w:
        client = await w.client()
        for _ in range(20):
            head = head_of(path_of(w, client), "Content-Encoding: gzip", "Content-Length: 20")
            async with raw_connection(w.url, head + b"z" * 20) as connection:
                await connection.last_answer()
    lines = [line for line in caplog.text.splitlines() if "rollout-1" in line or "aiohttp" in line]
    assert len(lines) == 6
    assert all("cannot be decoded" in line and len(line) < 300 for line in lines[:-1])
    assert "15 more lines were left out" in lines[-1]
    assert "Traceback" not in caplog.text


# Many at once.


@EVERY
async def test_one_more_than_the_most_running_turns_of_a_session_is_too_many(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, ping_s=60.0) as w, asyncio.TaskGroup() as group:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(wire, spec={"budgets": Budgets(max_turns=1000)})

        async def ask(text: str) -> Reply:
            return await Client(w.http, client.base_url, wire).say(text)

        asking = [group.create_task(ask(f"question {number}")) for number in range(MAX_RUNNING_TURNS)]
        await until(lambda: engine.running == MAX_RUNNING_TURNS)
        reply = await ask("one more")
        assert reply.status == 429
        assert "64 running requests" in read_refusal(wire.name, json.loads(reply.raw), limited=True)
        assert (await (await w.client(ANTHROPIC, session_id="other")).send(b"{}")).status == 400
        engine.may_answer.set()
    assert {task.result().status for task in asking} == {200}
