"""The control API on a real Ray Serve: found by name, replaced replicas, malformed bodies."""

from __future__ import annotations

import asyncio
import io
import os
import random
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psutil
import pytest

from headrace.actors.cluster.api import ControlArguments, build
from headrace.actors.cluster.api.client import ControlClient
from headrace.actors.cluster.runs.contract import ACTOR_NAME, RunsApi
from headrace.actors.cluster.runs.records import ActualState, RunEvent
from headrace.actors.errors import RunsMissing
from headrace.actors.runtime.actors.nodes import NAMESPACE
from headrace.actors.runtime.actors.runtime import ActorProxy, Host
from support.control_rig import malformed, write_keys
from support.observer_rig import simulated_run
from support.runs_without_services import RECIPE, RunsWithoutServices

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(300)]
STREAMS = 30
WAIT_S = 120


class Served(NamedTuple):
    url: str
    folder: Path


@pytest.fixture(scope="module")
def served(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The API on Serve, deployed from its arguments as `serve deploy` does. There are no runs yet."""
    from ray import serve

    folder = tmp_path_factory.mktemp("control")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    arguments = ControlArguments.model_validate({"key_file": str(write_keys(folder / "keys")), "cpus": 0})
    serve.run(build(arguments), name="control", route_prefix="/")
    yield Served(f"http://127.0.0.1:{port}", folder)
    serve.shutdown()


@pytest.fixture(scope="module")
def runs(served: Served) -> Iterator[RunsWithoutServices]:
    """The actor of runs, under its name."""
    import ray
    from ray import cloudpickle

    pickled = cloudpickle.dumps((30.0, None, ACTOR_NAME, RunsWithoutServices, (served.folder / "state",), {}))
    handle = (
        ray.remote(Host)
        .options(name=ACTOR_NAME, namespace=NAMESPACE, num_cpus=0, max_concurrency=1000, max_restarts=-1)
        .remote(pickled)
    )
    proxy: Any = ActorProxy(ACTOR_NAME, handle)
    yield proxy
    ray.kill(handle)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(tmp_path_factory.mktemp("page") / "run")


class CountingClient(ControlClient):
    """Counts the streams that it opened."""

    opened = 0

    async def _open_stream(self, run_id: str, after: int) -> aiohttp.ClientResponse:
        self.opened += 1
        return await super()._open_stream(run_id, after)


def replicas() -> list[int]:
    """Return the process ids of the replicas."""
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if child.cmdline()[:1] and "ServeReplica:control" in child.cmdline()[0]]


async def test_a_cluster_without_runs_is_404_with_the_fix(served: Served) -> None:
    async with ControlClient(served.url, "alice") as client:
        with pytest.raises(RunsMissing, match="headrace run --address"):
            await client.ask(RunsApi.runs)


async def test_no_event_is_missed_when_a_replica_is_killed(served: Served, runs: RunsWithoutServices) -> None:
    async with CountingClient(served.url, "alice", patience_s=WAIT_S) as client:
        run = (await client.ask(RunsApi.submit, "a", RECIPE, "k")).run_id
        seen: list[list[RunEvent]] = [[] for _ in range(STREAMS)]
        half = asyncio.Barrier(STREAMS + 1)

        async def read(events: list[RunEvent]) -> None:
            async for event in client.events(run):
                events.append(event)
                if event.text == "half":
                    await half.wait()

        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            for events in seen:
                tasks.create_task(read(events))
            for number in range(50):
                await runs.note(run, f"before {number}")
            await runs.note(run, "half")
            # All streams are open now, some of them on the replica that dies.
            await half.wait()
            assert client.opened == STREAMS
            os.kill(replicas()[0], signal.SIGKILL)
            for number in range(50):
                await runs.note(run, f"after {number}")
            await runs.go(run, ActualState.FINISHED, exit_code=0)
    assert client.opened > STREAMS
    expected = [event.number for event in seen[0]]
    assert expected == list(range(1, 105))
    assert all([event.number for event in events] == expected for events in seen)


async def test_a_browser_sees_the_page_of_a_run_from_every_replica(
    served: Served, runs: RunsWithoutServices, run_folder: Path
) -> None:
    async with ControlClient(served.url, "alice", patience_s=WAIT_S) as client:
        run = (await client.ask(RunsApi.submit, "page", RECIPE, "k-page")).run_id
    await runs.show(run, run_folder)
    root = f"{served.url}/v1/runs/{run}/page/"
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(WAIT_S), cookie_jar=aiohttp.CookieJar(unsafe=True)
    ) as browser:
        headers = {"Accept": "text/html"}
        async with browser.get(root, headers=headers) as form:
            assert (form.status, "This page needs its key" in await form.text()) == (401, True)
        async with browser.post(
            f"{root}login", data={"token": "alice-read", "next": f"/v1/runs/{run}/page/slow"}
        ) as view:
            assert (view.status, "<title>Slow" in await view.text()) == (200, True)
        # Any replica may answer, each over its own connection.
        for _ in range(10):
            async with browser.get(f"{root}running", headers=headers | {"Connection": "close"}) as view:
                assert (view.status, "<title>Running" in await view.text()) == (200, True)
        async with browser.get(f"{root}metrics") as metrics:
            assert "headrace_steps_total" in await metrics.text()
    await runs.go(run, ActualState.FAILED)


async def test_a_restarted_actor_is_found_again(served: Served, runs: RunsWithoutServices) -> None:
    async with ControlClient(served.url, "alice", patience_s=WAIT_S) as client:
        record = await client.ask(RunsApi.submit, "b", RECIPE, "k2")
        async with asyncio.timeout(WAIT_S):
            handle = await runs._resolved()  # type: ignore[attr-defined]
            process, _ = await handle.stats.remote(begin=False)
            os.kill(process.id, signal.SIGKILL)
            assert await client.ask(RunsApi.run, record.run_id) == record


async def test_malformed_bodies_give_no_server_error(served: Served, runs: RunsWithoutServices) -> None:
    chance = random.Random(18)
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer alice"}) as session:
        for number in range(100):
            headers = {"Idempotency-Key": str(number)}
            async with session.post(f"{served.url}/v1/runs", data=malformed(chance), headers=headers) as response:
                assert response.status < 500, await response.text()
        large = io.BytesIO(b" " * (2 << 20))
        async with session.post(f"{served.url}/v1/runs", data=large, headers={"Idempotency-Key": "x"}) as response:
            assert response.status == 413
