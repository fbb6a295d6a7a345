"""The gateway over real HTTP, between a plain HTTP agent and a scripted server that speaks SGLang's /generate."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.tiny import write_description
from headrace.policies.tokenizer import ChatTokenizer
from headrace.serve.client import GatewayClient
from headrace.serve.errors import GatewayUnreachable, SessionUnknown
from headrace.serve.events import Exhausted
from headrace.serve.gateway import Gateway, GatewayConfig
from headrace.serve.routing import EngineRoute, RoutingTable
from headrace.serve.rows import SessionReport
from headrace.serve.session import Budgets, Sampling, SessionId, SessionSpec
from headrace.serve.telemetry import TelemetryConfig, configure
from headrace.serve.tracing import start_rollout_span, trace_id_for, traceparent_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from opentelemetry.trace import Tracer

ADMIN = "an admin token of enough letters"
R1 = SessionId("rollout-1")
OUTPUT = "ls"


@dataclass
class ScriptedEngine:
    """SGLang's /generate and /abort_request. Answers `OUTPUT` and the end token, unless `script`'s next word is "500",
    "hold" (until aborted), "abort" (an abort of its own after one token) or "garbage"."""

    tokenizer: ChatTokenizer
    script: list[str] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: dict[str, asyncio.Event] = field(default_factory=dict)
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    version: str = "1.4"

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        word = self.script.pop(0) if self.script else ""
        if word == "500":
            return web.json_response({"error": {"message": "scripted"}}, status=500)
        ids = [*self.tokenizer.encode(OUTPUT), self.tokenizer.stop_ids[0]]
        if word == "hold":
            self.holding.set()
            await self.aborted.setdefault(body["rid"], asyncio.Event()).wait()
        if word in ("hold", "abort"):
            return self._reply(body, ids[:1], {"type": "abort", "message": "Aborted"}, "")
        if word == "garbage":
            return web.json_response({"text": "no ids"})
        return self._reply(body, ids, {"type": "stop", "matched": ids[-1]}, OUTPUT)

    def _reply(self, body: dict[str, Any], ids: list[int], finish: dict[str, Any], text: str) -> web.Response:
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 1,
            "num_retractions": 0,
            "weight_version": self.version,
            "weight_versions": [{"version": self.version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.25, token, None] for token in ids],
            "output_token_logprobs_length": len(ids),
        }
        return web.json_response({"text": text, "output_ids": ids, "meta_info": meta})

    async def abort_request(self, request: web.Request) -> web.Response:
        self.aborted.setdefault((await request.json())["rid"], asyncio.Event()).set()
        return web.Response()


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[ScriptedEngine]:
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort_request)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield engine
    finally:
        await runner.cleanup()


@dataclass
class World:
    gateway: Gateway
    url: str
    client: GatewayClient
    http: aiohttp.ClientSession
    engines: list[ScriptedEngine]

    async def open(self, session_id: SessionId = R1, **spec: Any) -> str:
        budgets = spec.pop("budgets", Budgets())
        [opened] = await self.client.open([SessionSpec(session_id=session_id, budgets=budgets, **spec)])
        return opened.base_url

    async def finish(self, session_id: SessionId = R1) -> SessionReport:
        [report] = await self.client.finish([session_id])
        assert isinstance(report, SessionReport)
        return report

    async def ask(self, base_url: str, messages: list[dict[str, str]], **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {"model": "any", "messages": messages, **fields}
        async with self.http.post(f"{base_url}/v1/chat/completions", json=body) as response:
            return response.status, await response.json()


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_description(folder)
    return folder


@asynccontextmanager
async def world(
    tokenizer_dir: Path, *, engines: int = 2, tracer: Tracer | None = None, **config: Any
) -> AsyncIterator[World]:
    settings = GatewayConfig(tokenizer_dir=tokenizer_dir, abort_grace_s=1.0, **config)
    tokenizer = ChatTokenizer(tokenizer_dir)
    gateway = Gateway(settings, ADMIN, tracer=tracer)
    async with (
        serving(ScriptedEngine(tokenizer)) as first,
        serving(ScriptedEngine(tokenizer)) as second,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
    ):
        url = await gateway.start()
        scripted = [first, second][:engines]
        routes = [EngineRoute(engine_id=EngineId(f"e{number}"), url=e.url) for number, e in enumerate(scripted)]
        try:
            assert await gateway.set_engines(RoutingTable(version=1, engines=tuple(routes)))
            async with GatewayClient(url, ADMIN) as client:
                yield World(gateway, url, client, http, scripted)
        finally:
            await gateway.stop()


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_a_conversation_is_captured_token_for_token(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        base = await w.open(sampling=Sampling(temperature=0.5))
        messages = [user("look first")]
        for turn in range(3):
            status, answer = await w.ask(base, messages, temperature=1.9, top_p=0.1, top_k=3, max_tokens=9)
            assert status == 200
            choice = answer["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == (OUTPUT, "stop")
            messages += [{"role": "assistant", "content": OUTPUT}, user(f"output {turn}")]
        sent = [request for engine in w.engines for request in engine.requests]
        assert [len(engine.requests) for engine in w.engines] == [3, 0], "a session stays with its engine"
        tokenizer = ChatTokenizer(tokenizer_dir)
        output = [*tokenizer.encode(OUTPUT), tokenizer.stop_ids[0]]
        for before, after in pairwise(sent):
            known = before["input_ids"] + output
            assert after["input_ids"][: len(known)] == known
        for request in sent:
            sampling = request["sampling_params"]
            assert (sampling["temperature"], sampling["max_new_tokens"]) == (0.5, 9)
            assert sampling.get("top_p", 1.0) == 1.0
            assert sampling.get("top_k", -1) == -1
        stats = await w.gateway.in_flight()
        assert (stats.sessions, stats.turns_in_flight) == (1, {})
        assert stats.tokens_by_version == {"1.4": 3 * len(output)}

        report = await w.finish()
        assert (report.turns, report.rerendered, report.failures) == (3, 0, ())
        assert report.trajectory is not None
        [row] = report.trajectory.rows
        assert row.tokens_T.tolist() == sent[-1]["input_ids"] + output
        assert row.tokens_T[row.loss_mask_T].tolist() == output * 3
        assert set(row.logprobs_T[row.loss_mask_T].tolist()) == {-0.25}
        assert {span.version for span in row.versions} == {PolicyVersion(1, 4)}
        assert report.trajectory.temperature == 0.5


async def test_a_spent_budget_ends_the_agent_with_a_normal_answer(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        base = await w.open(budgets=Budgets(max_turns=1))
        await w.ask(base, [user("a")])
        status, answer = await w.ask(base, [user("b")])
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        assert answer["choices"][0]["message"]["content"] == ""
        report = await w.finish()
        assert (report.turns, report.exhausted, report.failures) == (1, Exhausted.TURNS, ())


async def test_wall_time_ends_a_running_turn_and_aborts_it(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1) as w:
        w.engines[0].script = ["hold"]
        base = await w.open(budgets=Budgets(wall_s=2.0))
        status, answer = await w.ask(base, [user("a")])
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        report = await w.finish()
        assert (report.exhausted, report.sampled_tokens, report.masked) == (Exhausted.WALL, 1, {"aborted": 1})
        assert w.engines[0].aborted[w.engines[0].requests[0]["rid"]].is_set()


async def test_a_prompt_over_the_context_is_openais_own_error(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        base = await w.open(budgets=Budgets(max_context_tokens=8))
        status, answer = await w.ask(base, [user("x" * 400)])
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        report = await w.finish()
        assert (report.exhausted, report.trajectory, report.failures) == (Exhausted.CONTEXT, None, ())


async def test_an_engine_failure_is_resampled_on_the_other_engine(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        w.engines[0].script = ["500"]
        status, _ = await w.ask(await w.open(), [user("a")])
        assert status == 200
        assert [len(engine.requests) for engine in w.engines] == [1, 1]
        report = await w.finish()
        assert (report.turns, report.failures, report.masked) == (1, (), {})


@pytest.mark.parametrize("word", ["500", "garbage"])
async def test_two_engine_failures_reach_the_agent_and_mark_the_session(tokenizer_dir: Path, word: str) -> None:
    async with world(tokenizer_dir) as w:
        for engine in w.engines:
            engine.script = [word]
        base = await w.open()
        status, answer = await w.ask(base, [user("a")])
        assert (status, answer["error"]["type"]) == (502, "server_error")
        status, _ = await w.ask(base, [user("a")])
        assert status == 200, "the agent may go on, the mark stays"
        report = await w.finish()
        assert len(report.failures) == 1
        assert report.failures[0].startswith("engine_failed")
        assert report.turns == 1


async def test_an_abort_by_the_engine_goes_on_from_its_tokens(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1) as w:
        w.engines[0].script = ["abort"]
        status, _ = await w.ask(await w.open(), [user("a")])
        assert status == 200
        first, second = w.engines[0].requests
        one = ChatTokenizer(tokenizer_dir).encode(OUTPUT)[0]
        assert second["input_ids"] == [*first["input_ids"], one]
        assert second["rid"] != first["rid"]
        report = await w.finish()
        assert report.trajectory is not None
        row = report.trajectory.rows[0]
        assert [(s.start, s.end) for s in row.versions][1][0] == len(second["input_ids"])
        assert report.sampled_tokens == report.trained_tokens == int(row.loss_mask_T.sum())


async def test_closed_gates_hold_turns_until_they_open(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        base = await w.open()
        for engine in ("e0", "e1"):
            await w.gateway.close_gate(EngineId(engine), lease_s=60)
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(w.ask(base, [user("a")]))
            await asyncio.wait([turn], timeout=0.2)
            assert not turn.done()
            assert not any(engine.requests for engine in w.engines)
            await w.gateway.open_gate(EngineId("e1"))
            status, _ = await turn
        assert status == 200
        assert [len(engine.requests) for engine in w.engines] == [0, 1]


async def test_a_gate_whose_lease_ended_opens_by_itself(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1) as w:
        await w.gateway.close_gate(EngineId("e0"), lease_s=0.2)
        status, _ = await w.ask(await w.open(), [user("a")])
        assert status == 200


async def test_gates_closed_past_the_deadline_are_an_infra_failure(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1, gate_wait_s=0.2) as w:
        await w.gateway.close_gate(EngineId("e0"), lease_s=60)
        status, answer = await w.ask(await w.open(), [user("a")])
        assert (status, answer["error"]["code"]) == (503, "no_engine_open")
        report = await w.finish()
        assert report.failures[0].startswith("no_engine_open")
        assert w.engines[0].requests == []


async def test_an_engine_that_stays_silent_is_aborted_and_replaced(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, turn_timeout_s=1.0) as w:
        w.engines[0].script = ["hold"]
        status, _ = await w.ask(await w.open(), [user("a")])
        assert status == 200
        assert w.engines[0].aborted[w.engines[0].requests[0]["rid"]].is_set()
        report = await w.finish()
        assert (report.turns, report.failures) == (1, ())


async def test_an_agent_that_leaves_aborts_its_engine_call(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1) as w:
        engine = w.engines[0]
        engine.script = ["hold"]
        base = await w.open()
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(w.ask(base, [user("a")]))
            await engine.holding.wait()
            assert (await w.gateway.in_flight()).turns_in_flight == {"e0": 1}
            turn.cancel()
        rid = engine.requests[0]["rid"]
        async with asyncio.timeout(10):
            await engine.aborted.setdefault(rid, asyncio.Event()).wait()
        status, _ = await w.ask(base, [user("again")])
        assert status == 200
        report = await w.finish()
        assert report.turns == 1
        assert report.masked == {"aborted": 1}
        assert report.sampled_tokens == report.trained_tokens + 1
        assert report.failures == ()


async def test_an_abort_during_a_push_is_sent_again_when_the_gate_opens(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1) as w:
        engine = w.engines[0]
        engine.script = ["hold"]
        base = await w.open()
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(w.ask(base, [user("a")]))
            await engine.holding.wait()
            await w.gateway.close_gate(EngineId("e0"), lease_s=60)
            turn.cancel()
        rid = engine.requests[0]["rid"]
        async with asyncio.timeout(10):
            await engine.aborted.setdefault(rid, asyncio.Event()).wait()
        again = engine.aborted[rid] = asyncio.Event()
        await w.gateway.open_gate(EngineId("e0"))
        assert again.is_set()


async def test_finishing_a_session_ends_its_running_turn(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1) as w:
        w.engines[0].script = ["hold"]
        base = await w.open()
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(w.ask(base, [user("a")]))
            await w.engines[0].holding.wait()
            report = await w.finish()
            status, answer = await turn
        assert (status, answer["error"]["code"]) == (400, "unknown_session")
        assert (report.turns, report.masked, report.failures) == (0, {"aborted": 1}, ())


async def test_requests_of_one_session_run_one_after_the_other(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        base = await w.open()
        async with asyncio.TaskGroup() as group:
            turns = [group.create_task(w.ask(base, [user(f"side {number}")])) for number in range(4)]
        assert [turn.result()[0] for turn in turns] == [200] * 4
        report = await w.finish()
        assert (report.turns, report.rerendered) == (4, 3)
        assert report.sampled_tokens == report.trained_tokens


async def test_sessions_are_closed_to_each_other_and_to_the_unknown(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        mine = await w.open(R1)
        other = await w.open(SessionId("rollout-2"))
        assert mine != other
        await w.ask(mine, [user("secret")])
        status, answer = await w.ask(f"{w.url}/s/{'x' * 32}", [user("a")])
        assert (status, answer["error"]["code"]) == (400, "unknown_session")
        for session_id in (R1, SessionId("rollout-2")):
            assert (await w.ask(f"{w.url}/s/{session_id}", [user("a")]))[0] == 400, "an id opens nothing"
        assert (await w.finish(SessionId("rollout-2"))).trajectory is None
        assert (await w.ask(other, [user("a")]))[0] == 400, "closed"
        known, unknown = await w.client.finish([R1, SessionId("rollout-2")])
        assert isinstance(known, SessionReport)
        assert isinstance(unknown, SessionUnknown)


async def test_admin_routes_need_the_admin_token(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        token = (await w.open()).rsplit("/", 1)[1]
        for given in ("", "wrong", token, ADMIN + "x"):
            headers = {"Authorization": f"Bearer {given}"}
            for method, path in (("POST", "/sessions"), ("POST", "/sessions/finish"), ("DELETE", f"/sessions/{R1}")):
                async with w.http.request(method, w.url + path, headers=headers, json={}) as response:
                    assert response.status == 401
        async with w.http.delete(f"{w.url}/sessions/{R1}", headers={"Authorization": f"Bearer {ADMIN}"}) as response:
            assert response.status == 204
        assert (await w.gateway.in_flight()).sessions == 0


async def test_opening_is_all_or_nothing(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        await w.open(R1)
        specs = [SessionSpec(session_id=SessionId("rollout-2")), SessionSpec(session_id=R1)]
        with pytest.raises(GatewayUnreachable, match="answered 409"):
            await w.client.open(specs)
        assert (await w.gateway.in_flight()).sessions == 1
        assert len(await w.client.open([SessionSpec(session_id=SessionId(f"r-{i}")) for i in range(200)])) == 200


async def test_bad_bodies_get_the_wires_own_error_and_leave_the_gateway_alive(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, max_body_bytes=2**20) as w:
        url = f"{await w.open()}/v1/chat/completions"
        for data, expected in ((b"{", 400), (b"\xff", 400), (b"[1]", 400), (b'{"messages": []}', 400), (b"", 400)):
            async with w.http.post(url, data=data) as response:
                assert response.status == expected
                assert (await response.json())["error"]["type"] == "invalid_request_error"
        async with w.http.get(url) as response:
            assert response.status == 405
        async with w.http.get(f"{w.url}/nothing") as response:
            assert response.status == 404
            assert "error" in await response.json()
        async with w.http.get(f"{w.url}/healthz") as response:
            assert response.status == 200
        async with w.http.get(url.replace("/chat/completions", "/models")) as response:
            assert (await response.json())["data"][0]["id"] == "policy"
        assert (await w.finish()).failures == ()


async def test_a_body_of_64_mib_is_refused_unread(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        address = w.url.removeprefix("http://").split(":")
        path = (await w.open()).removeprefix(w.url) + "/v1/chat/completions"
        reader, writer = await asyncio.open_connection(address[0], int(address[1]))
        try:
            writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {64 * 2**20}\r\n\r\n{{".encode())
            async with asyncio.timeout(10):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
        finally:
            writer.close()
            await writer.wait_closed()
        assert head.startswith(b"HTTP/1.1 413")
        assert body["error"]["code"] == "body_too_large"


async def test_a_chunked_body_is_cut_off_at_the_limit(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, max_body_bytes=2**16) as w:

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(8):
                yield b"x" * 2**15

        async with w.http.post(f"{await w.open()}/v1/chat/completions", data=chunks()) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "body_too_large"


async def test_a_restarted_gateway_has_its_port_and_refuses_its_old_sessions(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        base = await w.open()
        port = int(w.url.rsplit(":", 1)[1])
        await w.gateway.stop()
        with pytest.raises(GatewayUnreachable):
            await w.client.finish([R1])
        async with Gateway(GatewayConfig(tokenizer_dir=tokenizer_dir), ADMIN) as successor:
            await successor.stop()
            assert await successor.start(port=port) == w.url
            status, answer = await w.ask(base, [user("a")])
            assert (status, answer["error"]["code"]) == (400, "unknown_session")
            [report] = await w.client.finish([R1])
            assert isinstance(report, SessionUnknown)


async def test_turn_spans_hang_below_the_rollout(tokenizer_dir: Path, tmp_path: Path) -> None:
    telemetry = configure(TelemetryConfig(), process="gateway", spans_dir=tmp_path, install=False)
    tracer = telemetry.tracer("test")
    async with world(tokenizer_dir, tracer=tracer) as w:
        w.engines[0].script = ["500"]
        root = start_rollout_span(tracer, "rollout-1", 1)
        base = await w.open(traceparent=traceparent_of(root))
        await w.ask(base, [user("a")])
        root.end()
    telemetry.shutdown()
    spans = [json.loads(line) for line in (tmp_path / "gateway.jsonl").read_text().splitlines()]
    assert {span["trace_id"] for span in spans} == {f"{trace_id_for('rollout-1', 1):032x}"}
    by_name = {span["name"]: span for span in spans}
    turn = by_name["turn"]
    assert turn["parent_id"] == by_name["rollout"]["span_id"]
    engines = [span for span in spans if span["name"] == "engine"]
    assert [span["attributes"]["headrace.engine.id"] for span in engines] == ["e0", "e1"]
    assert {span["parent_id"] for span in [*engines, by_name["render"]]} == {turn["span_id"]}
    assert turn["attributes"]["gen_ai.usage.output_tokens"] == 2
    assert engines[1]["attributes"]["gen_ai.response.finish_reasons"] == ["stop"]
    assert engines[1]["attributes"]["headrace.versions"] == ["1.4"]
    assert engines[0]["events"][0]["name"] == "exception"


async def test_a_short_admin_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Gateway(GatewayConfig(), "short")


async def test_a_wall_that_ends_while_no_engine_answers_is_infra_not_a_budget(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1, held_after_s=0.1) as w:
        await w.gateway.close_gate(EngineId("e0"), lease_s=60)
        status, _ = await w.ask(await w.open(budgets=Budgets(wall_s=2.0)), [user("a")])
        assert status == 200, "the agent still gets its normal end"
        report = await w.finish()
        assert report.failures
        assert report.failures[0].startswith("held")


async def test_an_agent_that_gives_up_on_a_held_turn_leaves_the_mark(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1, held_after_s=0.1) as w:
        await w.gateway.close_gate(EngineId("e0"), lease_s=60)
        base = await w.open()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await w.ask(base, [user("a")])
        report = await w.finish()
        assert report.failures
        assert report.failures[0].startswith("held")


async def test_a_body_that_cannot_be_decoded_is_the_agents_mistake(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir) as w:
        url, headers = await w.open(), {"Content-Encoding": "gzip"}
        async with w.http.post(f"{url}/v1/chat/completions", data=b"no gzip at all", headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_request")
        assert (await w.finish()).failures == ()


async def test_a_turn_waits_for_an_engine_while_all_are_down(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1) as w:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            down = EngineRoute(engine_id=EngineId("down"), url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
            assert await w.gateway.set_engines(RoutingTable(version=2, engines=(down,)))
            base = await w.open()
            async with asyncio.TaskGroup() as group:
                turn = group.create_task(w.ask(base, [user("a")]))
                await asyncio.wait([turn], timeout=0.3)
                assert not turn.done()
                up = EngineRoute(engine_id=EngineId("up"), url=w.engines[0].url)
                assert await w.gateway.set_engines(RoutingTable(version=3, engines=(up,)))
        assert turn.result()[0] == 200
        assert (await w.finish()).failures == ()


async def test_engines_that_stay_down_are_an_infra_failure(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, engines=1, gate_wait_s=0.3) as w:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            down = EngineRoute(engine_id=EngineId("down"), url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
            assert await w.gateway.set_engines(RoutingTable(version=2, engines=(down,)))
            status, _ = await w.ask(await w.open(), [user("a")])
        assert status >= 500
        assert len((await w.finish()).failures) == 1


async def test_a_session_that_nobody_finishes_ends_after_its_wall(tokenizer_dir: Path) -> None:
    async with world(tokenizer_dir, expire_grace_s=0.1) as w:
        base = await w.open(budgets=Budgets(wall_s=0.1))
        await w.open(SessionId("stays"))
        deadline = time.monotonic() + 10
        while (await w.gateway.in_flight()).sessions > 1:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        status, _ = await w.ask(base, [user("a")])
        assert status == 400
        assert isinstance((await w.client.finish([R1]))[0], SessionUnknown)
        assert (await w.finish(SessionId("stays"))).turns == 0
