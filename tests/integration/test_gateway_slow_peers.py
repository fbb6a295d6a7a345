"""Slow, silent and many clients, which must not delay others."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from benches.gateway.process import raise_open_files

from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets, SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient
from support.chat_templates import LONG
from support.gateway_program import gateway_program
from support.gateway_rig import (
    ADMIN,
    GUARD_S,
    WIRES,
    Client,
    Engine,
    Lines,
    address_of,
    deaf,
    request_bytes,
    serving,
    world,
)
from support.scripted_engine import Ask, check_exact

EITHER = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PLENTY = Budgets(max_tokens_per_turn=10**6, max_context_tokens=2 * 10**6)
MANY = 40


def much_or_little(ask: Ask) -> str:
    return LONG * 24_000 if "much" in ask.prompt else "little"


@EITHER
async def test_clients_that_never_read_do_not_delay_others(fat_dir: Path, stream: bool) -> None:
    async with world(fat_dir, much_or_little) as w, AsyncExitStack() as stack:
        client = await w.client(stream=stream, spec={"budgets": PLENTY})
        body = client.body(messages=client.wire.user("much"))
        for _ in range(10):
            await stack.enter_async_context(deaf(client, body))
        other = await w.client(session_id="other")
        assert (await other.say("go")).text == "little"
        assert len(w.engines[0].requests) == 11, "who asks again has a sample of its own"
        report = await w.finish()
        assert (report.turns, set(report.masked), report.failures) == (10, {"abandoned"}, ())
        assert (await other.say("and on")).text == "little"


@EITHER
async def test_a_client_that_reads_byte_by_byte_gets_the_whole_answer(model_dir: Path, stream: bool) -> None:
    async with world(model_dir, Lines("a few words")) as w:
        client = await w.client(stream=stream)
        loop = asyncio.get_running_loop()
        raw = b""
        async with asyncio.timeout(GUARD_S), deaf(client, client.body(messages=client.wire.user("go"))) as sock:
            while not is_whole(raw):
                raw += await loop.sock_recv(sock, 1)
        assert b"a few words" in raw
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked) == (1, {})


def is_whole(raw: bytes) -> bool:
    """Return whether an answer, including its headers, is complete."""
    head, _, body = raw.partition(b"\r\n\r\n")
    length = re.search(rb"Content-Length: (\d+)", head)
    return len(body) == int(length[1]) if length else body.endswith(b"\r\n0\r\n\r\n")


async def begin(url: str, *data: bytes) -> list[asyncio.StreamWriter]:
    writers = []
    for piece in data:
        _, writer = await asyncio.open_connection(*address_of(url))
        writer.write(piece)
        await writer.drain()
        writers.append(writer)
    return writers


async def test_endless_requests_delay_neither_others_nor_the_shutdown(model_dir: Path) -> None:
    async with world(model_dir) as w:
        client, other = await w.client(), await w.client(session_id="other")
        client.history += client.wire.user("go")
        path = client.base_url.removeprefix(w.url) + client.wire.path
        whole = request_bytes(path, json.dumps(client.body()).encode())
        head = whole.index(b"\r\n\r\n") + 4
        cuts = (0, 1, 20, head - 3, head, head + 1, len(whole) - 1)
        writers = await begin(w.url, *[whole[:length] for length in cuts] * MANY)
        assert (await other.say("go")).text == "ls"
        assert (await w.finish()).turns == 0
        # The last byte comes after the session's end.
        writers[-1].write(whole[-1:])
        async with asyncio.timeout(GUARD_S):
            await w.gateway.stop()
        for writer in writers:
            writer.close()
        assert len(w.engines[0].requests) == 1


CROWD = 1000


async def test_a_thousand_clients_at_once_are_all_answered(model_dir: Path, tmp_path: Path) -> None:
    raise_open_files()
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(Engine.of(model_dir, "<|im_end|>", Lines("here you are"))))
        program = await stack.enter_async_context(gateway_program(model_dir, tmp_path / "state", [engine.url]))
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=100.0))
        )
        admin = await stack.enter_async_context(GatewayClient(program.url, ADMIN, timeout_s=100.0))
        names = [SessionId(f"one-of-many-{number}") for number in range(CROWD)]
        opened = [await admin.open(SessionSpec(session_id=name)) for name in names]
        engine.may_answer.clear()
        async with asyncio.TaskGroup() as group:
            asking = []
            for number, one in enumerate(opened):
                client = Client(http, one.base_url, WIRES[number % 3], stream=number % 2 == 0)
                asking.append(group.create_task(client.say(f"I am {one.session_id}.")))
            while engine.running < CROWD:
                engine.asked.clear()
                await engine.asked.wait()
            engine.may_answer.set()
        assert {task.result().text for task in asking} == {"here you are"}
        for name, report in zip(names, await asyncio.gather(*map(admin.finish, names)), strict=True):
            assert isinstance(report, SessionReport)
            assert (report.session_id, report.turns, report.masked, report.failures) == (name, 1, {}, ())
