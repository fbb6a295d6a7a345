"""The client of the control API over HTTP: typed answers and errors, repeats, streams of events that are cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.actors.cluster.api.client import ControlClient
from headrace.actors.cluster.runs.contract import EngineChange, RunsApi
from headrace.actors.cluster.runs.quotas import Quota, Quotas
from headrace.actors.cluster.runs.records import ActualState, RunEvent, RunId
from headrace.actors.errors import (
    ActorLost,
    ApiRefused,
    CannotBePlaced,
    ConfigError,
    EngineUnknown,
    QuotaExceeded,
    RunRefused,
    RunsMissing,
    RunUnknown,
    SubmissionConflict,
)
from headrace.actors.runtime.actors import event_stream
from support.control_rig import ControlRig
from support.cutting_proxy import cutting_proxy
from support.runs_without_services import ALICE, RECIPE, serving

WAIT_S = 30
ADDED = EngineChange(engine_id="added-1", done="add")


@pytest.fixture
def rig(tmp_path: Path) -> ControlRig:
    return ControlRig(tmp_path)


@pytest.fixture
async def url(rig: ControlRig) -> AsyncIterator[str]:
    async with serving(rig.app) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[ControlClient]:
    async with ControlClient(url, "alice", patience_s=WAIT_S) as client:
        yield client


async def collect(client: ControlClient, run_id: str, **options: Any) -> list[RunEvent]:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in client.events(run_id, **options)]


async def test_every_call_has_a_typed_answer(rig: ControlRig, client: ControlClient) -> None:
    record = await client.ask(RunsApi.submit, "a", RECIPE, "k")
    assert record == await rig.runs.run(ALICE, record.run_id)
    assert await client.ask(RunsApi.runs) == (record,)
    assert await client.ask(RunsApi.run, record.run_id) == record
    assert await client.ask(RunsApi.status, record.run_id) == {"run": "a", "state": "starting"}
    assert await client.ask(RunsApi.report, record.run_id) == {"steps": 0}
    assert await client.ask(RunsApi.add_engine, record.run_id, "http://h:1", 5) == ADDED
    assert await client.ask(RunsApi.engines, record.run_id) == await rig.runs.engines(ALICE, record.run_id)
    await rig.runs.go(record.run_id, ActualState.RUNNING)
    assert await client.ask(RunsApi.remove_engine, record.run_id, "added-1", 5) == EngineChange(
        engine_id="added-1", done="remove"
    )
    page = await client.ask(RunsApi.logs, record.run_id, actor="service")
    assert len(page.lines) == 3
    assert (await client.ask(RunsApi.logs, record.run_id, after=page.cursor)).lines == ()
    assert (await client.ask(RunsApi.drain, record.run_id)).actual is ActualState.DRAINED
    assert (await client.ask(RunsApi.resume, record.run_id, ("training.steps=2",))).actual is ActualState.STARTING
    assert (await client.ask(RunsApi.stop, record.run_id)).actual is ActualState.STOPPED


async def test_errors_are_those_of_the_service(rig: ControlRig, client: ControlClient, url: str) -> None:
    run = (await client.ask(RunsApi.submit, "a", RECIPE, "k")).run_id
    with pytest.raises(SubmissionConflict, match="use a new key"):
        await client.ask(RunsApi.submit, "b", RECIPE, "k")
    with pytest.raises(RunRefused, match="choose another name"):
        await client.ask(RunsApi.submit, "a", RECIPE, "k2")
    with pytest.raises(ConfigError, match="unknown key model\\.x"):
        await client.ask(RunsApi.submit, "b", {**RECIPE, "model": {"x": 1}}, "k3")
    with pytest.raises(RunUnknown):
        await client.ask(RunsApi.run, RunId("no id?"))
    with pytest.raises(EngineUnknown):
        await client.ask(RunsApi.remove_engine, run, "a b?", 1)
    with pytest.raises(RunRefused, match="cannot be resumed"):
        await client.ask(RunsApi.resume, run)
    async with ControlClient(url, "wrong") as other:
        with pytest.raises(ApiRefused, match="unknown"):
            await other.ask(RunsApi.runs)
        with pytest.raises(ApiRefused, match="unknown"):
            await collect(other, run)
    async with ControlClient(url, "bob") as other:
        with pytest.raises(RunUnknown):
            await collect(other, run)
    for error in (RunsMissing("start it"), CannotBePlaced("no node")):
        rig.runs.error = error
        with pytest.raises(type(error), match=str(error)):
            await client.ask(RunsApi.runs)


async def test_a_run_that_never_fits_is_refused(tmp_path: Path) -> None:
    rig = ControlRig(tmp_path, Quotas(default=Quota(rollouts=1)))
    async with serving(rig.app) as url, ControlClient(url, "alice") as client:
        with pytest.raises(QuotaExceeded, match="raise the quota"):
            await client.ask(RunsApi.submit, "a", RECIPE, "k")


async def test_requests_are_repeated_while_the_service_is_away(rig: ControlRig, client: ControlClient) -> None:
    rig.runs.error = ActorLost("restarting")
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(client.ask(RunsApi.submit, "a", RECIPE, "k"))
        await rig.runs.until_lost(2)
        assert not waiting.done()
        rig.runs.error = None
    assert (await rig.runs.runs(ALICE)) == (waiting.result(),)


async def test_a_submission_whose_answer_is_lost_makes_one_run(rig: ControlRig, url: str) -> None:
    async with cutting_proxy(url) as proxy, ControlClient(proxy.url, "alice", patience_s=WAIT_S) as client:
        proxy.cut(0, 1)
        record = await client.ask(RunsApi.submit, "a", RECIPE, "k")
        assert proxy.answers == 3
    assert await rig.runs.runs(ALICE) == (record,)


async def test_an_api_that_stays_away_is_an_error(url: str) -> None:
    async with cutting_proxy(url) as proxy:
        gone = proxy.url
    async with ControlClient(gone, "alice", patience_s=0.5) as client:
        with pytest.raises(ActorLost, match="check --url"):
            await client.ask(RunsApi.runs)
        with pytest.raises(ActorLost, match="check --url"):
            await collect(client, "0" * 32)
    with pytest.raises(ConfigError, match="must begin with http"):
        ControlClient("10.0.0.1:8000", "alice")


async def test_events_come_until_the_run_has_ended(rig: ControlRig, client: ControlClient) -> None:
    run = (await client.ask(RunsApi.submit, "a", RECIPE, "k")).run_id
    async with asyncio.TaskGroup() as tasks:
        live = tasks.create_task(collect(client, run))
        await rig.runs.go(run, ActualState.RUNNING)
        await rig.runs.go(run, ActualState.FINISHED, exit_code=0)
    assert [event.state.value for event in live.result()] == ["waiting", "starting", "running", "finished"]
    assert [event.number for event in live.result()] == [1, 2, 3, 4]
    # Of an ended run, they are all there at once; after the last one there is nothing to wait for.
    assert await collect(client, run) == live.result()
    assert await collect(client, run, after=2) == live.result()[2:]
    assert await collect(client, run, after=4) == []


async def test_a_cut_stream_is_resumed_without_a_loss(rig: ControlRig, url: str) -> None:
    """Every connection is cut again and again, at any byte, while events come."""
    async with cutting_proxy(url) as proxy, ControlClient(proxy.url, "alice", patience_s=WAIT_S) as client:
        run = (await client.ask(RunsApi.submit, "a", RECIPE, "k")).run_id
        seen: list[RunEvent] = []

        async def read() -> None:
            async for event in client.events(run):
                seen.append(event)
                if event.number % 25 == 0:
                    proxy.drop()

        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(read())
            for number in range(200):
                await rig.runs.note(run, f"note {number}")
                await asyncio.sleep(0)
            await rig.runs.stop(ALICE, run)
    assert [event.number for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].state is ActualState.STOPPED
    assert len(seen) == 200 + 4


async def test_a_stream_stays_open_while_the_service_is_away(
    rig: ControlRig, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "AGAIN_S", 0.01)
    run = (await client.ask(RunsApi.submit, "a", RECIPE, "k")).run_id
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        stream = client.events(run)
        assert [(await anext(stream)).number for _ in range(2)] == [1, 2]
        rig.runs.error = ActorLost("restarting")
        rest = tasks.create_task(anext(stream))
        # The poll of before still runs; its event makes the stream ask again.
        await rig.runs.note(run, "before")
        assert (await rest).text == "before"
        await rig.runs.until_lost(2)
        rig.runs.error = None
        await rig.runs.note(run, "after")
        assert (await anext(stream)).text == "after"
        await stream.aclose()


async def test_the_wire_of_events_is_that_of_browsers(rig: ControlRig, url: str) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer alice"}) as session:
        run = await _submit(session, url)
        await rig.runs.stop(ALICE, run)
        events = f"{url}/v1/runs/{run}/events"
        async with session.get(events) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            blocks = (await response.text()).split("\n\n")
        assert blocks[0] == "retry: 1000"
        assert blocks[1].startswith("id: 1\nevent: run\ndata: {")
        assert blocks[-2:] == ["event: end\ndata: {}", ""]
        async with session.get(events, headers={"Last-Event-ID": "4"}) as response:
            assert response.status == 204
        async with session.get(events, headers={"Last-Event-ID": "x"}) as response:
            assert response.status == 400


async def test_a_quiet_stream_sends_comments(rig: ControlRig, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.actors.cluster.api.app.POLL_S", 0.05)
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer alice"}) as session:
        run = await _submit(session, url)
        async with session.get(f"{url}/v1/runs/{run}/events") as response, asyncio.timeout(WAIT_S):
            async for line in response.content:
                if line == b": still here\n":
                    break


async def _submit(session: aiohttp.ClientSession, url: str) -> Any:
    body = {"name": "a", "recipe": RECIPE}
    async with session.post(f"{url}/v1/runs", json=body, headers={"Idempotency-Key": "k"}) as response:
        return (await response.json())["run_id"]
