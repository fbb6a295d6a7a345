"""Connections of the gateway: deadlines of heads and answers, idle ones, and requests that no parser reads."""

from __future__ import annotations

import asyncio
import gc
import json
import select
import socket
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from headrace.serve.gateway.capture.session import Budgets
from headrace.serve.gateway.http.connections import Connection, ConnectionSettings, listen
from support.chat_templates import LONG
from support.gateway_program import gateway_program
from support.gateway_rig import (
    CHAT,
    GUARD_S,
    RESPONSES,
    WIRES,
    Client,
    Engine,
    Lines,
    Wire,
    World,
    deaf,
    request_bytes,
    serving,
    soon,
    until,
    world,
)
from support.raw_http import head_of, raw_connection
from support.scripted_engine import check_exact
from support.wires import read_refusal

EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
EITHER = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def path_of(w: World, client: Client) -> str:
    return client.base_url.removeprefix(w.url) + client.wire.path


# Heads.


@EVERY
async def test_an_unfinished_head_is_refused_at_its_deadline(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, header_timeout_s=0.1) as w:
        head = head_of(path_of(w, await w.client(wire)), "Content-Length: 10")
        for cut in (len(head) - 2, len(head) - 30):
            async with raw_connection(w.url, head[:cut]) as connection:
                answer = await connection.last_answer()
            assert (answer.version, answer.status) == ("HTTP/1.1", 408)
            assert "within 0.1 s" in read_refusal(wire.name, answer.document)


async def test_a_head_that_arrives_byte_by_byte_has_the_same_deadline(model_dir: Path) -> None:
    async with world(model_dir, header_timeout_s=0.1) as w, raw_connection(w.url, b"POST / HTTP/1.1\r\n") as connection:

        async def trickle() -> None:
            with suppress(ConnectionError):
                while True:
                    await connection.send(b"x")
                    await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            trickling = group.create_task(trickle())
            assert (await connection.answer()).status == 408
            trickling.cancel()


async def test_a_connection_without_a_request_is_closed_without_an_answer(model_dir: Path) -> None:
    async with world(model_dir, header_timeout_s=0.1) as w, raw_connection(w.url) as connection:
        assert await connection.rest() == b""


async def test_only_a_begun_head_has_a_deadline_on_an_idle_connection(model_dir: Path) -> None:
    request = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    async with world(model_dir, header_timeout_s=0.1) as w, raw_connection(w.url, request) as idle:
        assert (await idle.answer()).status == 200
        async with raw_connection(w.url, request) as other:
            assert (await other.answer()).status == 200
            # Clients may send an empty line after a body (RFC 9112, 2.2).
            await idle.send(b"\r\n")
            await other.send(request[:-5])
            answer = await other.last_answer()
            assert answer.status == 408
            read_refusal("chat", answer.document)
        # The other connection's deadline has passed on this one too.
        await idle.send(request[:5], request[5:])
        assert (await idle.answer()).status == 200


async def test_a_begun_head_behind_a_running_request_does_not_disturb_its_answer(model_dir: Path) -> None:
    async with world(model_dir, header_timeout_s=0.1, ping_s=60.0) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client()
        body = json.dumps(client.body(messages=CHAT.user("go"))).encode()
        async with raw_connection(w.url, request_bytes(path_of(w, client), body)) as connection:
            async with asyncio.timeout(GUARD_S):
                await engine.asked.wait()
            await connection.send(b"POST")
            async with raw_connection(w.url, b"POST") as later:
                assert (await later.last_answer()).status == 408
            engine.may_answer.set()
            assert (await connection.answer()).status == 200
            assert await connection.rest() == b""
        assert (await w.finish()).turns == 1


def connections_alive() -> int:
    return sum(type(each) is Connection for each in gc.get_objects())


async def test_a_closed_connection_is_freed_without_a_collection(model_dir: Path) -> None:
    """Full collections are minutes apart, and agents open thousands of connections meanwhile."""
    async with world(model_dir, Lines("ls")) as w:
        base_url = await w.open()
        gc.collect()
        gc.disable()
        try:
            before = connections_alive()
            async with aiohttp.ClientSession() as http:
                assert (await Client(http, base_url, CHAT).say("go")).status == 200
                assert connections_alive() == before + 1
            await until(lambda: connections_alive() == before)
        finally:
            gc.enable()


# Clients that do not read.


async def reset_of(sock: socket.socket) -> None:
    """Wait until the peer resets the connection, without reading from it."""
    poll = select.poll()
    poll.register(sock, select.POLLERR)
    assert await asyncio.to_thread(poll.poll, GUARD_S * 1000), "the connection remains open"
    with pytest.raises(ConnectionResetError):
        while sock.recv(2**16):
            pass


@EITHER
async def test_an_answer_that_is_not_read_ends_the_connection_and_is_not_delivered(fat_dir: Path, stream: bool) -> None:
    budgets = Budgets(max_tokens_per_turn=10**6, max_context_tokens=2 * 10**6)
    async with world(fat_dir, Lines(LONG * 24_000), send_timeout_s=0.2) as w:
        client = await w.client(stream=stream, system="", spec={"budgets": budgets})
        async with deaf(client, client.body(messages=client.wire.user("go"))) as sock:
            await reset_of(sock)
        report = await w.finish()
        assert (report.turns, set(report.masked), report.failures) == (1, {"abandoned"}, ())


async def test_a_writer_waits_until_the_last_byte_is_sent() -> None:
    """Also for fewer bytes than an event loop usually buffers; and it learns that they were not sent."""
    outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        response = web.Response(body=b"x" * 50_000)
        await response.prepare(request)
        try:
            await response.write_eof()
        except ConnectionError:
            outcome.set_result(False)
            raise
        outcome.set_result(True)
        return response

    app = web.Application()
    app.router.add_post("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    settings = ConnectionSettings(header_timeout_s=GUARD_S, send_timeout_s=0.2, refused=lambda *_: None)
    server = await listen(runner, "127.0.0.1", 0, settings)
    try:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(server.sockets[0].getsockname())
            sock.sendall(head_of("/"))
            assert not await asyncio.wait_for(outcome, GUARD_S)
    finally:
        server.close()
        await runner.cleanup()


async def test_pings_that_are_not_read_end_the_connection_and_its_turn(model_dir: Path) -> None:
    async with world(model_dir, ping_s=0.001, send_timeout_s=0.2) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(RESPONSES, stream=True)
        async with deaf(client, client.body(input=client.wire.user("go"))):
            await soon(engine.abort_asked)
        assert (await w.finish()).masked == {"aborted": 1}


async def test_a_slow_reader_within_the_deadline_gets_its_answer(fat_dir: Path) -> None:
    budgets = Budgets(max_tokens_per_turn=10**6, max_context_tokens=2 * 10**6)
    async with world(fat_dir, Lines(LONG * 24_000), send_timeout_s=GUARD_S) as w:
        client = await w.client(system="", spec={"budgets": budgets})
        loop, raw = asyncio.get_running_loop(), b""
        async with asyncio.timeout(GUARD_S), deaf(client, client.body(messages=client.wire.user("go"))) as sock:
            while not raw.endswith(b"}"):
                raw += await loop.sock_recv(sock, 2**16)
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked) == (1, {})


# Requests that no parser reads.


@EVERY
async def test_requests_that_are_not_http_are_refused_in_the_form_of_the_api(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        path = path_of(w, await w.client(wire))
        broken = (
            head_of(path, "Na me: x"),
            head_of(path, "Content-Length: ten"),
            # Its body arrives in several pieces, the next ones perhaps before the refusal.
            head_of(path, "Content-Length: ten") + b"x" * 300_000,
            head_of(path, "Content-Length: 1", "Transfer-Encoding: chunked"),
            head_of(path, f"Long: {'x' * 9000}"),
            head_of(path, *[f"Name-{number}: x" for number in range(200)]),
            f"POST {path} HTTP/7.7\r\n\r\n".encode(),
        )
        for head in broken:
            async with raw_connection(w.url, head) as connection:
                answer = await connection.last_answer()
            assert (answer.version, answer.status) == ("HTTP/1.1", 400), head
            assert answer.headers["content-type"].startswith("application/json")
            assert "not a valid request" in read_refusal(wire.name, answer.document)


async def test_what_has_no_path_is_refused_in_the_form_of_openai(model_dir: Path) -> None:
    async with world(model_dir) as w:
        for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"\xff\xfe /\r\n\r\n"):
            async with raw_connection(w.url, data) as connection:
                answer = await connection.last_answer()
            assert (answer.version, answer.status) == ("HTTP/1.1", 400), data
            assert "not a valid request" in read_refusal("chat", answer.document)


async def test_requests_that_no_parser_reads_write_a_few_short_lines(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(model_dir) as w:
        client = await w.client()
        for path in [path_of(w, client)] * 20 + [f"/s/nobody{number}/v1/messages" for number in range(20)]:
            async with raw_connection(w.url, head_of(path, "Na me: x")) as connection:
                await connection.last_answer()
    lines = [line for line in caplog.text.splitlines() if "request refused" in line or "left out" in line]
    assert len(lines) == 12
    assert sum("session rollout-1: " in line for line in lines) == 6
    assert all(len(line) < 400 for line in lines)
    assert "Traceback" not in caplog.text


async def test_the_process_of_a_gateway_has_the_same_connections(model_dir: Path, tmp_path: Path) -> None:
    """It runs on another event loop."""
    async with (
        serving(Engine.of(model_dir, "<|im_end|>", Lines("ls"))) as engine,
        gateway_program(model_dir, tmp_path / "state", [engine.url]) as program,
        raw_connection(program.url, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n") as connection,
    ):
        assert (await connection.answer()).status == 200
        await connection.send(b"hello\r\n\r\n")
        answer = await connection.last_answer()
        assert (answer.version, answer.status) == ("HTTP/1.1", 400)
