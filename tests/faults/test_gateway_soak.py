"""Sessions that end in any way leave nothing behind in the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import aiohttp
import pytest

from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import SessionId, SessionSpec
from headrace.serve.gateway.http.client import GatewayClient
from support.gateway_program import GatewayProgram, gateway_program
from support.gateway_rig import ADMIN, GUARD_S, WIRES, Client, Engine, Lines, World, serving, soon, world
from support.scripted_engine import Ask, Fault

# Whatever ends a session.


def as_told(ask: Ask) -> str | Fault:
    """The last message says what to do."""
    last = ask.prompt.rsplit("<|im_start|>user", 1)[1]
    return next((fault for fault in Fault if f"please {fault.value}" in last), "fine")


async def lives(w: World, number: int) -> None:
    """Run one session for each kind of end."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=GUARD_S)) as http:

        async def begin(name: str) -> Client:
            stream, wire = bool(number % 2), WIRES[number % 3]
            client = Client(http, await w.open(f"{name}-{number}"), wire, stream=stream)
            assert (await client.say("begin")).text == "fine"
            return client

        for fault in (Fault.ERROR, Fault.GARBAGE, Fault.CUT, Fault.ABORT):
            assert (await (await begin(fault.value)).say(f"please {fault.value}")).status >= 500
            await w.finish(f"{fault.value}-{number}")
        await begin("forgotten")
        assert await delete(w, f"forgotten-{number}") == 204
        for name in ("left", "finished", "deleted"):
            client = await begin(name)
            w.engines[0].asked.clear()
            turn = asyncio.ensure_future(client.say("please hang"))
            await soon(w.engines[0].asked)
            if name == "left":
                turn.cancel()
            if name == "deleted":
                assert await delete(w, f"deleted-{number}") == 204
            else:
                assert (await w.finish(f"{name}-{number}")).turns == 1
            with suppress(asyncio.CancelledError):
                assert (await turn).status == 400


async def delete(w: World, name: str) -> int:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    async with w.http.delete(f"{w.url}/sessions/{name}", headers=headers) as response:
        return response.status


def tasks() -> set[str]:
    """What runs, besides the connections that are kept."""
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    return {name for name in names if name != "RequestHandler.start"}


async def test_a_session_leaves_no_task_and_no_log_however_it_ends(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, as_told, session_log_dir=tmp_path, finished_grace_s=0.0) as w:
        before = tasks()
        for number in range(6):
            await lives(w, number)
        stats = await w.gateway.in_flight()
        assert (stats.sessions, stats.turns_in_flight) == (0, {})
        assert tasks() == before
        assert logs_in(tmp_path, "*.jsonl") == 0


def logs_in(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


# Thousands.

SESSIONS_AT_ONCE = 50
ROUNDS = 150
TURNS = 3


@dataclass(frozen=True)
class Used:
    memory_mb: float
    files: int
    threads: int


async def one_session(http: aiohttp.ClientSession, base_url: str, number: int) -> None:
    client = Client(http, base_url, WIRES[number % 3], stream=number % 2 == 0)
    for turn in range(TURNS):
        reply = await client.say(json.dumps({"number": number, "turn": turn}))
        assert reply.status == 200


async def one_round(program: GatewayProgram, admin: GatewayClient, number: int) -> Used:
    names = [SessionId(f"r{number}-{index}") for index in range(SESSIONS_AT_ONCE)]
    opened = [await admin.open(SessionSpec(session_id=name)) for name in names]
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=3 * GUARD_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http, asyncio.TaskGroup() as group:
        for index, one in enumerate(opened):
            group.create_task(one_session(http, one.base_url, index))
    for report in await asyncio.gather(*map(admin.finish, names)):
        assert isinstance(report, SessionReport)
        assert (report.turns, report.masked) == (TURNS, {})
    return Used(program.memory_mb(), program.open_files(), program.threads())


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_thousands_of_sessions_leave_nothing_behind(model_dir: Path, tmp_path: Path) -> None:
    logs = tmp_path / "state"
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(Engine.of(model_dir, "<|im_end|>", Lines("all is well"))))
        program = await stack.enter_async_context(gateway_program(model_dir, logs, [engine.url]))
        admin = await stack.enter_async_context(GatewayClient(program.url, ADMIN))
        used = [await one_round(program, admin, number) for number in range(ROUNDS)]
    print([round(one.memory_mb) for one in used])
    third = ROUNDS // 3
    check_flat(used[third : 2 * third], used[2 * third :])
    assert logs_in(logs, "*.finished") == ROUNDS * SESSIONS_AT_ONCE, "they stay ten minutes"
    assert logs_in(logs, "*.jsonl") == 0


def check_flat(middle: Sequence[Used], last: Sequence[Used]) -> None:
    assert mean(one.memory_mb for one in last) < 1.03 * mean(one.memory_mb for one in middle)
    assert max(one.files for one in last) <= max(one.files for one in middle) + SESSIONS_AT_ONCE
    assert max(one.threads for one in last) <= max(one.threads for one in middle)
