"""The workers of a real sglang-router are followed as they come and go."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from headrace.actors.engines.registry import EngineState, Origin
from headrace.policies.sglang.server import free_port
from support import group_rig as kit

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sglang_router") is None, reason="sglang-router is not installed (of the dev extra)"
)


@asynccontextmanager
async def routing(folder: Path, http: aiohttp.ClientSession, *workers: str) -> AsyncIterator[str]:
    """A router over these workers; its URL, once it knows them."""
    url = f"http://127.0.0.1:{(port := free_port('127.0.0.1'))}"
    command = (sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port))
    metrics = ("--prometheus-port", str(free_port("127.0.0.1")))
    with (folder / "router.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, *metrics, "--worker-urls", *workers, "--policy", "round_robin", stdout=log, stderr=log
        )
    try:
        async with asyncio.timeout(60):
            while await known(http, url) != set(workers):
                assert process.returncode is None, (folder / "router.log").read_text()
                await asyncio.sleep(0.1)
        yield url
    finally:
        process.kill()
        await process.wait()


async def known(http: aiohttp.ClientSession, url: str) -> set[str]:
    try:
        async with http.get(f"{url}/workers") as response:
            return {worker["url"] for worker in (await response.json())["workers"]}
    except aiohttp.ClientError:
        return set()


async def test_engines_are_added_and_removed_with_the_workers_of_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.engines.group.SUPERVISION_S", 0.2)
    model, other = (kit.write_weights(tmp_path / f"model-{seed}", seed) for seed in range(2))
    async with (
        aiohttp.ClientSession() as http,
        kit.servers(model, tmp_path, "a", "b") as servers,
        routing(tmp_path, http, servers["a"].url) as router,
        kit.open_group(model, tmp_path, count=0, router=router) as rig,
    ):
        await rig.push(other, 1)
        engines = await rig.until_serving(1, "1.1")
        assert {engine.origin for engine in engines.values()} == {Origin.ROUTER}
        async with http.post(f"{router}/workers", json={"url": servers["b"].url}) as response:
            worker = (await response.json())["worker_id"]
        await rig.until_serving(2, "1.1")
        assert kit.versions_of(await rig.turn()) == {"1.1"}
        async with http.delete(f"{router}/workers/{worker}") as response:
            assert response.status in (200, 202)
        [left] = (await rig.until_serving(1, "1.1")).values()
        assert left.url == servers["a"].url
        assert left.state is EngineState.SERVING
        assert all(process.alive for process in servers.values())
        assert await kit.is_free(http, [process.url for process in servers.values()])
