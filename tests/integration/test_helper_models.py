"""Helper models on engines that a run starts: Chat Completions of their own, apart from the policy."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from headrace.actors.errors import ConfigError
from headrace.actors.services import started as starting
from headrace.actors.services.chat import ChatMessage
from headrace.actors.services.clients import ServiceClients
from headrace.actors.services.config import ServiceConfig
from headrace.actors.services.started import read_started, resolved, running_services, stop_services

GUARD_S = 120.0


@pytest.fixture
def chat_model() -> Path:
    """The shipped tiny policy, with its chat template."""
    return Path(__file__).parents[2] / "scripts" / "models" / "tiny"


def table(model: Path, **more: Any) -> dict[str, ServiceConfig]:
    return {"helper": ServiceConfig.model_validate({"kind": "model", "path": model, "model": "h", **more})}


async def post(url: str, body: object) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.post(f"{url}/v1/chat/completions", json=body) as response:
        return response.status, await response.json()


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def test_a_run_starts_a_helper_model_once_and_asks_it_like_any_other(chat_model: Path, tmp_path: Path) -> None:
    configs, folder = table(chat_model, engine={"max_context": 64}), tmp_path / "services"
    asked = "repair RATE in calc.py so that test.py passes"
    try:
        async with asyncio.timeout(GUARD_S), running_services(configs, folder) as urls:
            async with ServiceClients(resolved(configs, urls)) as clients:
                question = [ChatMessage(role="user", content=asked)]
                said = await clients.model("helper").complete(question, max_tokens=12, temperature=0.0, seed=1)
            assert said in ("cat calc.py", "cat test.py"), "what this policy was trained to answer"
            first = read_started(folder / "helper.json")
            body = {"messages": [{"role": "user", "content": asked}], "max_tokens": 6, "temperature": 0}
            greedy = [await post(urls["helper"], body) for _ in range(2)]
            assert [status for status, _ in greedy] == [200, 200]
            assert greedy[0][1]["choices"] == greedy[1][1]["choices"]
            assert 0 < greedy[0][1]["usage"]["completion_tokens"] <= 6
            for change, reason in (
                ({"messages": [{"role": "user", "content": "x " * 500}]}, "maximum context length is 64 tokens"),
                ({"temperature": "hot"}, "temperature must be a number from 0 to 10."),
                ({"messages": []}, "messages"),
            ):
                status, refused = await post(urls["helper"], body | change)
                assert status == 400
                assert reason in refused["error"]["message"]
        # An interrupted run leaves it; the next one finds it.
        async with asyncio.timeout(GUARD_S), running_services(configs, folder):
            assert read_started(folder / "helper.json") == first
    finally:
        await stop_services(folder)
    assert first is not None
    assert first.process() is None


async def test_an_engine_that_dies_takes_its_server_along_and_both_are_started_again(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "LOOK_S", 0.2)
    configs, folder = table(chat_model), tmp_path / "services"
    try:
        async with asyncio.timeout(GUARD_S), running_services(configs, folder) as urls:
            first = read_started(folder / "helper.json")
            assert first is not None
            (engine,) = children(first.pid)
            engine.kill()
            while (second := read_started(folder / "helper.json")) is None or second.pid == first.pid:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            assert second.url == urls["helper"]
            status, _ = await post(second.url, {"messages": [{"role": "user", "content": "go"}], "max_tokens": 1})
            assert status == 200
            (engine,) = children(second.pid)
            # Killed as the kernel does when memory runs out: nothing is left behind.
            psutil.Process(second.pid).kill()
            gone, alive = await asyncio.to_thread(psutil.wait_procs, [engine], timeout=GUARD_S)
            assert (len(gone), alive) == (1, [])
    finally:
        await stop_services(folder)


async def test_what_is_no_model_is_refused_with_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"services\.helper\.path: .*has no config\.json"):
        async with running_services(table(tmp_path), tmp_path / "services"):
            pass
    log = (tmp_path / "services" / "helper.log").read_text()
    assert "Traceback" not in log
    for settings, reason in (
        ({"url": "http://127.0.0.1:9"}, "url and path are both set"),
        ({"kind": "retriever"}, "path is for models"),
        ({"path": None, "url": "http://127.0.0.1:9", "engine": {"backend": "sglang"}}, "engine has no effect"),
        ({"path": None}, "url and path are missing"),
    ):
        with pytest.raises(ValueError, match=reason):
            ServiceConfig.model_validate(json.loads(json.dumps({"kind": "model", "path": str(tmp_path), **settings})))


async def test_an_address_in_use_and_an_engine_that_dies_end_the_command_with_one_line(chat_model: Path) -> None:
    command = (sys.executable, "-c", "from headrace.actors.cli.app import main; main()", "serve", "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process = await asyncio.create_subprocess_exec(
            *command, "--model", str(chat_model), "--port", port, stderr=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(GUARD_S):
            _, said = await process.communicate()
    assert said.decode().startswith(f"headrace: --host 127.0.0.1 --port {port}: ")
    process = await asyncio.create_subprocess_exec(
        *command, "--model", str(chat_model), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(GUARD_S):
        await process.stdout.readline()
        children(process.pid)[0].kill()
        _, said = await process.communicate()
    assert said.decode().splitlines()[-1].startswith("headrace: the engine exited by itself with code -9")
    assert "Traceback" not in said.decode()
