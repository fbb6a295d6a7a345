"""`headrace serve gateway --processes 2` as a program: sessions are placed, requests find them, processes are
replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from headrace.serve.gateway.http.placement import most_processes, place_of
from support.gateway_program import GatewayProgram, gateway_program
from support.gateway_rig import ADMIN, ANTHROPIC, CHAT, GUARD_S, WIRES, Client, Engine, Lines, Wire, serving
from support.process_handles import all_dead, opened

pytestmark = pytest.mark.skipif(most_processes() < 2, reason="needs two cores")
NAMES = [next(f"s{number}" for number in range(100) if place_of(f"s{number}", 2) == place) for place in (0, 1)]
"""A session of each process."""
TIMES = 3


@dataclass
class Processes:
    program: GatewayProgram
    engine: Engine
    http: aiohttp.ClientSession

    async def admin(self, method: str, path: str, body: Any = None, token: str = ADMIN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.http.request(method, self.program.url + path, json=body, headers=headers) as response:
            return response.status, await response.json() if response.status != 204 else None

    async def open(self, *names: str) -> list[str]:
        """Open sessions; return their base URLs."""
        urls = []
        for name in names:
            status, opened = await self.admin("POST", "/sessions", {"session_id": name})
            assert (status, opened["session_id"]) == (200, name), opened
            urls.append(opened["base_url"])
        return urls

    def members(self) -> dict[int, psutil.Process]:
        """The processes behind the front, by their ports."""
        found = {}
        for child in psutil.Process(self.program.pid).children():
            listening = [one for one in child.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
            found |= {one.laddr.port: child for one in listening}
        return found


async def refusal(*options: str) -> tuple[int | None, str]:
    command = str(Path(sys.executable).with_name("headrace"))
    process = await asyncio.create_subprocess_exec(
        command, "serve", "gateway", *options, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(GUARD_S):
        _, said = await process.communicate()
    return process.returncode, " ".join(said.decode().split())


@asynccontextmanager
async def processes(model_dir: Path, tmp_path: Path) -> AsyncIterator[Processes]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(serving(Engine.of(model_dir, "<|im_end|>", Lines("Hello."))))
        started = gateway_program(model_dir, tmp_path / "state", [engine.url], "--processes", "2")
        program = await stack.enter_async_context(started)
        yield Processes(program, engine, await stack.enter_async_context(aiohttp.ClientSession()))


async def test_sessions_are_spread_over_processes_that_each_have_a_port_and_a_log(
    model_dir: Path, tmp_path: Path
) -> None:
    async with processes(model_dir, tmp_path) as p:
        urls = await p.open(*NAMES)
        ports = [int(url.split("/s/")[0].rpartition(":")[2]) for url in urls]
        assert sorted(ports) == sorted(p.members())
        for url in urls:
            assert (await Client(p.http, url, CHAT).say("go")).text == "Hello."
        assert all(list((tmp_path / "state" / f"process-{place}").iterdir()) for place in (0, 1))
        told = [await p.admin("POST", f"/sessions/{name}/finish", {}) for name in (NAMES[1], "none", NAMES[0])]
        assert [(status, report.get("turns")) for status, report in told] == [(200, 1), (400, None), (200, 1)]
        [first, second] = p.engine.sampled
        assert first.prompt == second.prompt


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_a_session_in_its_path_finds_its_process(
    model_dir: Path, tmp_path: Path, wire: Wire, *, stream: bool
) -> None:
    async with processes(model_dir, tmp_path) as p:
        for name, url in zip(NAMES, await p.open(*NAMES), strict=True):
            token = url.rpartition("/s/")[2]
            for headers, base in (
                ({"Authorization": f"Bearer {token}"}, p.program.url),
                ({"x-api-key": token}, p.program.url),
                ({}, f"{p.program.url}/s/{token}"),
            ):
                client = Client(p.http, base, wire, headers=headers, stream=stream)
                assert (await client.say("go")).text == "Hello."
            status, report = await p.admin("POST", f"/sessions/{name}/finish", {})
            assert (status, report["turns"]) == (200, 3)
            status, document = await p.admin("GET", f"/sessions/{name}/export?form=rows")
            assert (status, document["session_id"]) == (200, name)


async def test_sessions_are_opened_once_in_all_processes(model_dir: Path, tmp_path: Path) -> None:
    async with processes(model_dir, tmp_path) as p:
        await p.open(NAMES[1])
        status, refused = await p.admin("POST", "/sessions", {"session_id": NAMES[1]})
        assert (status, refused["error"]["code"]) == (409, "session_exists")
        await p.open(NAMES[0])
        assert (await p.admin("DELETE", f"/sessions/{NAMES[0]}"))[0] == 204
        for unnamed in ({}, {"session_id": None}):
            status, one = await p.admin("POST", "/sessions", unnamed)
            assert (status, one["session_id"].startswith("session-")) == (200, True)
            assert (await p.admin("POST", f"/sessions/{one['session_id']}/finish", {}))[0] == 200
        for body in ({"session_id": 7}, {"unknown": 1}, [1]):
            assert (await p.admin("POST", "/sessions", body))[0] == 400, body
        assert (await p.admin("POST", "/sessions", {}, token="wrong"))[0] == 401
        assert (await p.admin("POST", f"/sessions/{NAMES[0]}/finish", {}, token="wrong"))[0] == 401


@pytest.mark.parametrize("token", ["7.none", "0.none", "none", ""])
async def test_an_unknown_session_is_refused_in_the_form_of_the_api(
    model_dir: Path, tmp_path: Path, token: str
) -> None:
    async with processes(model_dir, tmp_path) as p:
        client = Client(p.http, p.program.url, ANTHROPIC, headers={"x-api-key": token})
        refused = await client.say("go")
        assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
        async with p.http.get(f"{p.program.url}/healthz") as response:
            assert await response.json() == {"status": "ok", "processes": 2, "serving": 2}


async def test_a_killed_process_comes_back_on_its_port_with_its_sessions(model_dir: Path, tmp_path: Path) -> None:
    async with processes(model_dir, tmp_path) as p:
        urls = await p.open(*NAMES)
        tokens = [url.rpartition("/s/")[2] for url in urls]
        clients = [Client(p.http, p.program.url, CHAT, headers={"x-api-key": token}) for token in tokens]
        for client in clients:
            assert (await client.say("go")).text == "Hello."
        before = p.members()
        victim = before[int(urls[0].split("/s/")[0].rpartition(":")[2])]
        handles = opened([victim.pid])
        victim.kill()
        await all_dead(handles)
        # Waits until the process is back; the other one goes on.
        async with asyncio.timeout(GUARD_S):
            assert (await clients[1].say("on")).text == "Hello."
            assert (await clients[0].say("on")).text == "Hello."
        after = p.members()
        assert sorted(after) == sorted(before)
        assert victim.pid not in {child.pid for child in after.values()}
        for name in NAMES:
            status, report = await p.admin("POST", f"/sessions/{name}/finish", {})
            assert (status, report["turns"], len(report["rows"])) == (200, 2, 1)
        async with p.http.get(f"{urls[0].split('/s/')[0]}/healthz") as response:
            assert response.status == 200


async def test_a_hangup_replaces_the_processes_one_at_a_time_and_loses_no_turn(model_dir: Path, tmp_path: Path) -> None:
    async with processes(model_dir, tmp_path) as p:
        urls = await p.open(*NAMES)
        clients = [Client(p.http, p.program.url, CHAT, headers={"x-api-key": url.rpartition("/s/")[2]}) for url in urls]
        handles = opened(child.pid for child in p.members().values())
        p.engine.may_answer.clear()
        held = [asyncio.create_task(client.say("go")) for client in clients]
        while len(p.engine.requests) + p.engine.running < 2:
            p.engine.asked.clear()
            await asyncio.wait_for(p.engine.asked.wait(), GUARD_S)
        os.kill(p.program.pid, signal.SIGHUP)
        p.engine.may_answer.set()
        for task in held:
            assert (await asyncio.wait_for(task, GUARD_S)).text == "Hello.", "the turn that ran was not cut"

        # While one process is replaced, a request for it waits.
        for client in clients:
            assert (await asyncio.wait_for(client.say("on"), GUARD_S)).text == "Hello."
        await all_dead(handles)
        for client in clients:
            assert (await asyncio.wait_for(client.say("and on"), GUARD_S)).text == "Hello."
        for name, client in zip(NAMES, clients, strict=True):
            status, report = await p.admin("POST", f"/sessions/{name}/finish", {})
            assert status == 200
            assert (len(report["rows"]), report["failures"]) == (1, [])
            assert report["turns"] == len(client.history) // 2 == 3
            assert report["trained_tokens"] == report["sampled_tokens"]


async def test_more_processes_than_cores_are_refused(model_dir: Path, tmp_path: Path) -> None:
    most = most_processes()
    given = ("--engine", "http://127.0.0.1:1", "--tokenizer", str(model_dir), "--max-context-tokens", "100")
    code, said = await refusal(*given, "--admin-token-file", str(tmp_path / "t"), "--processes", str(most + 1))
    assert code != 0
    assert f"--processes {most + 1}: this machine has {most} cores for them; use at most {most}" in said


async def test_a_folder_of_other_processes_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "processes.json").write_text('{"ports": [1, 2, 3]}')
    given = ("--engine", "http://127.0.0.1:1", "--tokenizer", str(model_dir), "--max-context-tokens", "100")
    token = ("--admin-token-file", str(tmp_path / "t"))
    code, said = await refusal(*given, *token, "--processes", "2", "--state", str(tmp_path / "state"))
    assert code != 0
    assert "belong to 3 processes" in said
