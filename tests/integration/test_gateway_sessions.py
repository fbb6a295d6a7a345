"""Sessions over real HTTP: opening, three kinds of authentication, finishing once, and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from headrace.serve.gateway.capture.session import Budgets, Sampling, SessionId
from headrace.serve.gateway.errors import SessionUnknown
from headrace.serve.gateway.http.client import GatewayClient
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from support.gateway_rig import (
    ADMIN,
    ANTHROPIC,
    CHAT,
    GUARD_S,
    R1,
    WIRES,
    Client,
    Lines,
    Wire,
    World,
    renderer_of,
    soon,
    table_of,
    world,
)
from support.scripted_engine import Fault, check_exact

EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)


@asynccontextmanager
async def successor(w: World, model_dir: Path, log: Path, **config: Any) -> AsyncIterator[World]:
    """Start a gateway at the address of one that ended."""
    port = int(w.url.rsplit(":", 1)[1])
    settings = GatewayConfig(tokenizer_dir=model_dir, session_log_dir=log, abort_grace_s=10.0, **config)
    gateway = Gateway(settings, ADMIN, renderer=renderer_of(model_dir))
    try:
        assert await gateway.start(port=port) == w.url
        assert await gateway.set_engines(table_of(w.engines))
        async with GatewayClient(w.url, ADMIN) as admin:
            yield World(gateway, w.url, admin, w.http, w.engines)
    finally:
        await gateway.stop()


# Ways in.


@EVERY
@pytest.mark.parametrize("way", ["path", "bearer", "bearer in small letters", "x-api-key"])
async def test_a_session_is_found_by_path_bearer_and_api_key(model_dir: Path, wire: Wire, way: str) -> None:
    async with world(model_dir) as w:
        base = await w.open()
        token = base.rsplit("/", 1)[1]
        headers = {
            "path": {},
            "bearer": {"Authorization": f"Bearer {token}"},
            "bearer in small letters": {"authorization": f"bearer {token}"},
            "x-api-key": {"x-api-key": token},
        }[way]
        client = Client(w.http, base if way == "path" else w.url, wire, headers=headers)
        assert (await client.say("go")).text == "ls"
        assert (await w.finish()).turns == 1


async def test_the_token_in_the_path_takes_precedence_over_an_api_key(model_dir: Path) -> None:
    async with world(model_dir) as w:
        client = await w.client(ANTHROPIC, headers={"Authorization": "Bearer sk-made-up", "x-api-key": "other"})
        assert (await client.say("go")).status == 200


@EVERY
async def test_an_unknown_or_closed_session_returns_400_at_once(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire)
        await client.say("go")
        await w.finish()
        for base, headers in (
            (client.base_url, {}),
            (f"{w.url}/s/{'x' * 32}", {}),
            (f"{w.url}/s/{R1}", {}),
            (w.url, {"Authorization": "Bearer nobody"}),
            (w.url, {"Authorization": "Basic bm9ib2R5"}),
            (w.url, {"Authorization": "Bearer"}),
            (w.url, {}),
        ):
            for stream in (False, True):
                reply = await Client(w.http, base, wire, stream=stream, headers=headers).say("go")
                assert (reply.status, "unknown or closed" in reply.error["message"]) == (400, True)
        assert len(w.engines[0].requests) == 1


async def test_health_routes_need_no_session(model_dir: Path) -> None:
    async with world(model_dir) as w:
        for method in ("HEAD", "GET"):
            for path in ("/", "/healthz", "/s/anything", "/s/anything/"):
                async with w.http.request(method, w.url + path) as response:
                    assert response.status == 200, path
        assert (await w.gateway.in_flight()).sessions == 0


async def test_a_token_grants_access_only_to_its_own_session(model_dir: Path) -> None:
    async with world(model_dir) as w:
        mine, other = await w.client(), await w.client(session_id="rollout-2")
        await mine.say("a secret")
        token = mine.base_url.rsplit("/", 1)[1]
        for path, body in (
            ("/sessions", {}),
            (f"/sessions/{R1}/finish", {}),
        ):
            for given in (token, "", "wrong", ADMIN + "x", ADMIN[:-1]):
                status, answer = await w.post(path, body, token=given)
                assert (status, answer["error"]["code"]) == (401, "admin_token_required")
        async with w.http.delete(f"{w.url}/sessions/{R1}", headers={"Authorization": f"Bearer {token}"}) as response:
            assert response.status == 401
        assert (await Client(w.http, f"{w.url}/s/{ADMIN.replace(' ', '%20')}", CHAT).say("go")).status == 400
        await other.say("something else")
        assert (await w.finish(SessionId("rollout-2"))).turns == 1
        report = await w.finish()
        assert report.trajectory is not None
        assert report.turns == 1
        assert "a secret" in w.engines[0].sampled[0].prompt
        assert "a secret" not in w.engines[0].sampled[1].prompt


# Opening and finishing.


async def test_an_id_in_use_is_refused(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, session_log_dir=tmp_path) as w:
        await w.open()
        status, answer = await w.post("/sessions", {"session_id": R1})
        assert (status, answer["error"]["code"]) == (409, "session_exists")
        assert (await w.gateway.in_flight()).sessions == 1
        assert len({await w.open(f"r-{n}") for n in range(300)}) == 300


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b'{"session_id": "a b"}', "session_id"),
        (b'{"session_id": ""}', "session_id"),
        (b'{"session_id": 7}', "session_id"),
        (b'{"sessions": []}', "sessions"),
        (b'{"sessions": 3}', "sessions"),
        (b'{"sampling": {"temperature": -1}}', "sampling.temperature"),
        (b'{"sampling": {"temperature": NaN}}', "sampling.temperature"),
        (b'{"budgets": {"wall_s": Infinity}}', "budgets.wall_s"),
        (b'{"budgets": {"wall_s": 0}}', "budgets.wall_s"),
        (b'{"budgets": {"max_turns": 1e30}}', "budgets.max_turns"),
        (b'{"budgets": {"max_turns": 100000000000000000000000}}', "budgets.max_turns"),
        (b'{"max_context_tokens": 99999999999}', "max_context_tokens"),
        (b'{"unknown": 1}', "unknown"),
    ],
)
async def test_an_invalid_open_request_returns_400_naming_the_key(
    model_dir: Path, tmp_path: Path, body: bytes, key: str
) -> None:
    async with world(model_dir, session_log_dir=tmp_path) as w:
        status, answer = await w.post("/sessions", body)
        assert (status, answer["error"]["message"].split(":")[0]) == (400, key)
        assert (await w.gateway.in_flight()).sessions == 0


async def test_a_session_id_may_contain_route_names(model_dir: Path) -> None:
    async with world(model_dir) as w:
        for name in ("sessions", "finish", "a/b", "a/finish", "..."):
            status, answer = await w.post("/sessions", {"session_id": name})
            assert (status, answer.get("session_id")) == (200, name)
            assert (await w.post(f"/sessions/{name}/finish"))[0] == 200


async def test_finishing_a_session_ends_its_running_turns_with_a_refusal(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.HANG)) as w:
        client = await w.client()
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(client.say("go"))
            await soon(w.engines[0].asked)
            report = await w.finish()
        assert (turn.result().status, turn.result().error["code"]) == (400, "unknown_session")
        assert (report.turns, report.masked, report.failures) == (0, {"aborted": 1}, ())


async def test_finishing_a_session_again_returns_its_report(model_dir: Path, tmp_path: Path) -> None:
    """The first connection broke while a turn was being ended, which loses nothing."""
    async with world(model_dir, Lines("said", Fault.HANG), session_log_dir=tmp_path, abort_grace_s=10.0) as w:
        [engine] = w.engines
        client = await w.client()
        await client.say("go")
        async with asyncio.TaskGroup() as group:
            engine.asked.clear()
            engine.may_abort.clear()
            turn = group.create_task(client.say("on"))
            await soon(engine.asked)
            first = group.create_task(w.finish())
            await soon(engine.abort_asked)
            first.cancel()
            await asyncio.wait([first])
            assert (await w.post("/sessions", {"session_id": R1}))[0] == 409, "not over yet"
            again = [group.create_task(w.finish()) for _ in range(2)]
            async with w.http.get(f"{w.url}/healthz"):
                pass
            engine.may_abort.set()
        assert turn.result().status == 400
        for one in again:
            check_exact(one.result(), w.engines)
            assert (one.result().turns, one.result().masked) == (1, {"aborted": 1})
        assert (await w.finish()).turns == 1, "and again, from the log"
        assert (await w.gateway.in_flight()).sessions == 0
        assert (await w.post("/sessions", {"session_id": R1}))[0] == 200


def break_log_of(name: str, folder: Path) -> None:
    """Make a line in the middle of the log invalid."""
    [log] = [path for path in folder.iterdir() if f'"session_id":"{name}"'.encode() in path.read_bytes()]
    first, rest = log.read_bytes().split(b"\n", 1)
    log.write_bytes(first + b"\n{" + rest)


async def test_a_session_with_a_broken_log_does_not_affect_others(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, session_log_dir=tmp_path) as w:
        good, bad = await w.client(session_id="good"), await w.client(session_id="bad")
        await good.say("go")
        await bad.say("go")
        await w.gateway.stop()
        break_log_of("bad", tmp_path)
        async with successor(w, model_dir, tmp_path) as again:
            assert (await good.say("still here")).status == 200
            reply = await bad.say("still here")
            assert (reply.status, reply.error["code"]) == (503, "session_log_broken")
            with pytest.raises(SessionUnknown, match="session_log_broken"):
                await again.admin.finish(SessionId("bad"))
            found = await again.admin.finish(SessionId("good"))
            assert found.turns == 2


async def test_an_unfinished_session_expires_after_its_wall_time(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, expire_grace_s=0.05, session_log_dir=tmp_path) as w:
        client = await w.client(spec={"budgets": Budgets(wall_s=0.05)})
        await w.open("stays")
        async with asyncio.timeout(GUARD_S):
            # Nothing happens in the gateway when a session's time is over: it looks when it is asked.
            while (await w.gateway.in_flight()).sessions > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert (await client.say("go")).status == 400
        assert len(logs_in(tmp_path)) == 1
        with pytest.raises(SessionUnknown):
            await w.admin.finish(R1)
        assert (await w.finish(SessionId("stays"))).turns == 0


def logs_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


# Restarts.


@EVERY
async def test_a_restarted_gateway_continues_the_sessions_of_its_predecessor(
    model_dir: Path, tmp_path: Path, wire: Wire
) -> None:
    spec = {"sampling": Sampling(temperature=0.5), "budgets": Budgets(max_turns=3)}
    async with world(model_dir, Lines("one", "two", "three"), session_log_dir=tmp_path) as w:
        client = await w.client(wire, spec=spec)
        await client.say("go")
        await client.say("on")
        await w.gateway.stop()
        async with successor(w, model_dir, tmp_path) as again:
            assert (await client.say("and on")).text == "three"
            assert (await client.say("more")).text == Budgets().final_text
            report = await again.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.exhausted, len(report.lineages)) == (3, "turns", 1)
        assert report.trajectory is not None
        assert report.trajectory.temperature == 0.5


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stopped_gateway_disconnects_its_agents_and_its_successor_answers(
    model_dir: Path, tmp_path: Path, stream: bool
) -> None:
    """Any answer, such as a refusal, would end agents that the successor can still serve."""
    async with world(model_dir, Lines(Fault.HANG, "after"), session_log_dir=tmp_path, ping_s=0.05) as w:
        client = await w.client(ANTHROPIC, stream=stream)
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(_cut_off(client))
            await soon(w.engines[0].asked)
            await w.gateway.stop()
        assert turn.result()
        async with successor(w, model_dir, tmp_path) as again:
            assert (await client.send(client.body())).text == "after"
            report = await again.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked, report.failures) == (1, {"aborted": 1}, ())


async def _cut_off(client: Client) -> bool:
    with pytest.raises(aiohttp.ClientError):
        await client.say("go")
    return True


async def test_without_a_log_sessions_end_with_the_gateway(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.HANG)) as w:
        client = await w.client()
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(client.say("go"))
            await soon(w.engines[0].asked)
            await w.gateway.stop()
        assert turn.result().status == 400
        port = int(w.url.rsplit(":", 1)[1])
        async with Gateway(GatewayConfig(tokenizer_dir=model_dir), ADMIN) as gateway:
            await gateway.stop()
            assert await gateway.start(port=port) == w.url
            assert (await client.say("go")).error["code"] == "unknown_session"
            with pytest.raises(SessionUnknown):
                await w.admin.finish(R1)
