"""Gateway over real HTTP with its engines: capture, routing and failures of engines.

Tests by the behaviour of a gateway for agents (G: here, D: test_gateway_delivery.py, S:
test_gateway_sessions.py, W: test_gateway_wires.py, H: test_gateway_histories.py, B: test_gateway_bad_input.py, A:
test_gateway_standalone.py, K: tests/faults/test_gateway_kill.py, P: tests/properties/test_gateway_fuzz.py):

 1 health routes without a session              S health_routes_need_no_session
 2 session by Bearer, x-api-key or path         S a_session_is_found_by_*, an_unknown_or_closed_session_is_400_at_once
 3 three APIs, stream or not: same tokens       W the_same_engine_gives_the_same_tokens_in_every_dialect
 4 unknown input never breaks a run             W unknown_fields_and_headers_are_ignored, a_model_name_may_be_*
 5 count_tokens is the rendered length          W count_tokens_*
 6 usage is correct                             W usage_counts_the_engines_prompt_and_sampled_tokens
 7 exact when the agent only appends            G a_conversation_is_captured_token_for_token, W the_same_engine_*
 8 exact under rewritten echoes                 H a_rewritten_echo_loses_no_token
 9 volatile fields are ignored                  H volatile_request_fields_are_ignored
10 system messages in the middle                H system_messages_in_the_middle_only_append
11 reasoning echoed, stripped, summarised       H reasoning_remains_in_the_tokens_whatever_is_echoed
12 parallel calls                               H parallel_calls_*
13 two subagents and their parent               H subagents_have_their_own_lineages
14 compaction                                   H a_compaction_*
15 dropped turns                                H a_turn_that_the_agent_dropped_*
16 retries are one turn                         D retries_in_flight_*, an_answer_is_replayed_*, a_sent_answer_*
17 finished, delivered, accepted, abandoned     H the_tree_reports_the_status_of_every_turn
18 buffered, with pings                         D a_waiting_stream_gets_pings_and_no_content
19 no clean end without the terminator          D a_failure_*, an_internal_error_*
20 max tokens clamped, then the API's refusal   W context_exceeded_*, the_rest_of_the_context_*
21 how a turn ended                             W every_turn_end_has_the_dialects_stop_reason, a_stop_string_*
22 a disconnect aborts the engine call          D a_client_that_disconnects_*, a_connection_reset_*, G an_abort_is_*
23 weight update in a turn                      G a_weight_update_within_a_turn_is_recorded_per_token
24 budgets end an agent normally                W a_spent_budget_*, the_end_of_the_wall_*
25 kill -9, spans                               K, G turn_spans_are_children_of_the_rollout; routing G a_conversation_*
"""

from __future__ import annotations

import asyncio
import errno
import socket
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from headrace.actors.telemetry.spans.store import SpanFolder
from headrace.policies.engine import EngineId
from headrace.serve.gateway.capture.session import Budgets, Sampling
from headrace.serve.gateway.errors import SERVER_FAILED, ParserUnknown
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from headrace.serve.tracing.telemetry import TelemetryConfig, configure
from headrace.serve.tracing.tracing import start_rollout_span, trace_id_for, traceparent_of
from support.gateway_rig import (
    ADMIN,
    ANTHROPIC,
    CHAT,
    WIRES,
    Lines,
    Wire,
    soon,
    table_of,
    until,
    world,
)
from support.scripted_engine import Ask, Fault, check_exact

pytestmark = pytest.mark.core

LS = Lines("ls")


async def test_a_conversation_is_captured_token_for_token(model_dir: Path) -> None:
    async with world(model_dir, Lines("one", "two", "three"), LS) as w:
        [engine, other] = w.engines
        client = await w.client(spec={"sampling": Sampling(temperature=0.5)})
        for turn in range(3):
            reply = await client.say(f"output {turn}", temperature=1.9, top_p=0.1, top_k=3, max_tokens=9)
            assert (reply.status, reply.end) == (200, "stop")
        assert (len(engine.requests), len(other.requests)) == (3, 0)
        for before, after in pairwise(engine.sampled):
            known = before.prompt_ids + before.output_ids
            assert after.prompt_ids[: len(known)] == known
        for request in engine.requests:
            sampling = request["sampling_params"]
            assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.5, 1.0, -1)
            assert sampling["max_new_tokens"] == 9
        stats = await w.gateway.in_flight()
        assert (stats.sessions, stats.turns_in_flight) == (1, {})
        assert stats.tokens_by_version == {"1.4": sum(map(len, engine.outputs()))}

        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.rerendered, report.failures, report.masked) == (3, 0, (), {})
        assert report.trajectory is not None
        [row] = report.trajectory.rows
        assert tuple(row.tokens_T.tolist()) == engine.sampled[-1].prompt_ids + engine.sampled[-1].output_ids
        assert row.logprobs_T[row.loss_mask_T].tolist() == [each for one in engine.sampled for each in one.logprobs]
        assert not row.logprobs_T[~row.loss_mask_T].any()
        assert {str(span.version) for span in row.versions} == {"1.4"}
        assert report.trajectory.temperature == 0.5


async def test_turns_of_one_session_run_concurrently(model_dir: Path) -> None:
    async with world(model_dir) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client()
        async with asyncio.TaskGroup() as group:
            bodies = [client.body(messages=CHAT.user(f"side {number}")) for number in range(4)]
            turns = [group.create_task(client.send(body)) for body in bodies]
            async with asyncio.timeout(20):
                while engine.running < 4:
                    engine.asked.clear()
                    await engine.asked.wait()
            engine.may_answer.set()
        assert [turn.result().status for turn in turns] == [200] * 4
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.rerendered, report.masked) == (4, 3, {})


# Failing engines.


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.CUT, Fault.GARBAGE])
async def test_a_turn_whose_engine_fails_is_resampled_on_the_other_engine(model_dir: Path, fault: Fault) -> None:
    async with world(model_dir, Lines(fault, "not asked"), LS) as w:
        assert (await (await w.client()).say("go")).text == "ls"
        assert [len(engine.requests) for engine in w.engines] == [1, 1]
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.failures, report.masked) == (1, (), {})


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.CUT, Fault.GARBAGE])
async def test_two_engine_failures_reach_the_agent_and_mark_the_session(model_dir: Path, fault: Fault) -> None:
    async with world(model_dir, Lines(fault, "ls"), Lines(fault, "ls")) as w:
        client = await w.client()
        reply = await client.say("go")
        assert (reply.status, reply.error["code"]) == (503, "engine_failed")
        assert reply.error["message"] == SERVER_FAILED, "hosts and ports are none of its business"
        assert (await client.send(client.body())).status == 200, "the agent may go on, the mark stays"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, len(report.failures)) == (1, 1)
        assert report.failures[0].startswith("engine_failed")


async def test_a_weight_update_during_a_turn_is_recorded_per_token(model_dir: Path) -> None:
    """The engine gives the turn up after a token; it goes on from there, under another version."""

    def script(ask: Ask) -> str | Fault:
        engine.version = f"1.{3 + ask.number}"
        return Fault.ABORT if ask.number < 3 else "the end"

    async with world(model_dir, script) as w:
        [engine] = w.engines
        client = await w.client()
        assert (await client.say("go")).end == "stop"
        first, second, third = engine.sampled
        assert second.prompt_ids == first.prompt_ids + first.output_ids
        assert third.prompt_ids == second.prompt_ids + second.output_ids
        assert len({request["rid"] for request in engine.requests}) == 3
        status, document = await w.post("/sessions/rollout-1/finish")
        assert status == 200
        [row] = document["rows"]
        start = len(first.prompt_ids)
        assert row["versions"] == [
            [start, start + 1, "1.4", False],
            [start + 1, start + 2, "1.5", False],
            [start + 2, len(row["tokens"]), "1.6", False],
        ]
        assert sum(row["loss_mask"]) == document["sampled_tokens"] == document["trained_tokens"]


async def test_an_engine_that_always_aborts_is_a_failure_and_its_tokens_are_recorded(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.ABORT)) as w:
        reply = await (await w.client()).say("go")
        assert (reply.status, reply.error["code"]) == (503, "engine_failed")
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, set(report.masked), len(report.failures)) == (0, {"aborted"}, 1)


async def test_a_call_to_a_silent_engine_is_aborted_and_retried_elsewhere(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.HANG), LS, turn_timeout_s=2.0) as w:
        assert (await (await w.client()).say("go")).status == 200
        [silent, _] = w.engines
        assert silent.aborted[silent.requests[0]["rid"]].is_set()
        report = await w.finish()
        assert (report.turns, report.failures) == (1, ())


async def test_ids_outside_the_vocabulary_are_never_sent(model_dir: Path) -> None:
    """One of them kills an SGLang server."""
    async with world(model_dir, vocab_size=300) as w:
        reply = await (await w.client()).say("go")
        assert reply.status == 503
        assert w.engines[0].requests == []
        [failure] = (await w.finish()).failures
        assert "outside the vocabulary [0, 300)" in failure


# Which engine.


async def test_a_conversation_stays_with_its_engine_and_another_one_gets_the_idle_engine(model_dir: Path) -> None:
    async with world(model_dir, LS, LS) as w:
        first, second = w.engines
        first.may_answer.clear()
        main = await w.client(ANTHROPIC, tools=("bash", "agent"))
        side = await w.client(ANTHROPIC, session_id="rollout-2")
        side.base_url, side.tools = main.base_url, ("bash",)
        async with asyncio.TaskGroup() as group:
            group.create_task(main.say("go"))
            await soon(first.asked)
            assert (await side.say("look")).status == 200
            first.may_answer.set()
        assert [len(engine.requests) for engine in w.engines] == [1, 1]
        for _ in range(3):
            await side.say("and")
            await main.say("then")
        assert [len(engine.requests) for engine in w.engines] == [4, 4]
        assert all('"agent"' in one.prompt for one in first.sampled)
        assert not any('"agent"' in one.prompt for one in second.sampled)


async def test_an_abort_is_sent_to_the_engine_that_runs_the_turn(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.HANG), Lines(Fault.HANG)) as w:
        first, second = w.engines
        clients = [await w.client(session_id=f"r-{number}") for number in range(2)]
        async with asyncio.TaskGroup() as group:
            stays = group.create_task(clients[0].say("go"))
            await soon(first.asked)
            leaves = group.create_task(clients[1].say("go"))
            await soon(second.asked)
            leaves.cancel()
            await soon(second.aborted[second.requests[0]["rid"]])
            assert not any(event.is_set() for event in first.aborted.values())
            assert [rid for rid, event in second.aborted.items() if event.is_set()] == [second.requests[0]["rid"]]
            assert (await w.finish("r-1")).masked == {"aborted": 1}
            await w.finish("r-0")
        assert stays.result().status == 400


async def test_a_turn_waits_for_an_engine_while_all_are_down(model_dir: Path) -> None:
    async with world(model_dir) as w:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            down = EngineRoute(engine_id=EngineId("down"), url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
            assert await w.gateway.set_engines(RoutingTable(version=2, engines=(down,)))
            client = await w.client()
            async with asyncio.TaskGroup() as group:
                turn = group.create_task(client.say("go"))
                await asyncio.wait([turn], timeout=0.2)
                assert not turn.done()
                assert await w.gateway.set_engines(table_of(w.engines, version=3))
        assert turn.result().status == 200
        assert (await w.finish()).failures == ()


async def test_engines_that_stay_down_are_an_infra_failure(model_dir: Path) -> None:
    """F3."""
    async with world(model_dir, gate_wait_s=0.3) as w:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            down = EngineRoute(engine_id=EngineId("down"), url=f"http://127.0.0.1:{nobody.getsockname()[1]}")
            assert await w.gateway.set_engines(RoutingTable(version=2, engines=(down,)))
            reply = await (await w.client()).say("go")
        assert reply.status == 503
        assert len((await w.finish()).failures) == 1


# Gates.


async def test_closed_gates_hold_turns_until_they_open(model_dir: Path) -> None:
    async with world(model_dir, LS, LS) as w:
        client = await w.client()
        for engine in ("e0", "e1"):
            await w.gateway.close_gate(EngineId(engine), lease_s=60)
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(client.say("go"))
            await asyncio.wait([turn], timeout=0.2)
            assert not turn.done()
            assert not any(engine.requests for engine in w.engines)
            await w.gateway.open_gate(EngineId("e1"))
        assert turn.result().status == 200
        assert [len(engine.requests) for engine in w.engines] == [0, 1]


async def test_a_gate_opens_when_its_lease_expires(model_dir: Path) -> None:
    async with world(model_dir) as w:
        await w.gateway.close_gate(EngineId("e0"), lease_s=0.2)
        assert (await (await w.client()).say("go")).status == 200


async def test_having_no_routable_engine_by_the_deadline_is_an_infra_failure(model_dir: Path) -> None:
    async with world(model_dir, gate_wait_s=0.2) as w:
        refused = [replace(route, admitted=False) for route in table_of(w.engines, version=2).engines]
        assert await w.gateway.set_engines(RoutingTable(version=2, engines=tuple(refused)))
        reply = await (await w.client()).say("go")
        assert (reply.status, reply.error["code"]) == (503, "no_engine_open")
        assert (await w.finish()).failures[0].startswith("no_engine_open")
        assert w.engines[0].requests == []


async def test_an_abort_during_a_push_is_repeated_when_the_gate_opens(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.HANG)) as w:
        [engine] = w.engines
        client = await w.client()
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(client.say("go"))
            await soon(engine.asked)
            await w.gateway.close_gate(EngineId("e0"), lease_s=60)
            turn.cancel()
        rid = engine.requests[0]["rid"]
        await soon(engine.aborted[rid])
        engine.refused_aborts.add(rid)
        again = engine.aborted[rid] = asyncio.Event()
        await w.gateway.open_gate(EngineId("e0"))
        assert again.is_set()
        engine.refused_aborts.clear()
        again = engine.aborted[rid] = asyncio.Event()
        await w.gateway.open_gate(EngineId("e0"))
        assert again.is_set(), "it was refused, and is sent again"
        again = engine.aborted[rid] = asyncio.Event()
        await w.gateway.open_gate(EngineId("e0"))
        assert not again.is_set(), "it was accepted, and is not sent again"


async def test_aborts_are_repeated_concurrently_until_each_has_arrived(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.HANG, Fault.HANG), abort_grace_s=100.0) as w:
        [engine] = w.engines
        clients = [await w.client(), await w.client(session_id="another")]
        async with asyncio.TaskGroup() as group:
            turns = [group.create_task(client.say("go")) for client in clients]
            await until(lambda: len(engine.requests) == 2)
            await w.gateway.close_gate(EngineId("e0"), lease_s=60)
            for turn in turns:
                turn.cancel()
        first, second = (body["rid"] for body in engine.requests)
        waiting = w.gateway._pool._clients[EngineId("e0")].aborts_to_repeat
        await until(lambda: len(waiting) == 2)
        await soon(engine.aborted[first])
        await soon(engine.aborted[second])
        for rid in (first, second):
            engine.aborted[rid], engine.held_aborts[rid] = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            opening = group.create_task(w.gateway.open_gate(EngineId("e0")))
            await soon(engine.aborted[first])
            await soon(engine.aborted[second])
            engine.held_aborts[first].set()
            await until(lambda: waiting == {second.removesuffix("/")})
            opening.cancel()
        engine.held_aborts[second].set()
        engine.aborted[first] = asyncio.Event()
        await w.gateway.open_gate(EngineId("e0"))
        assert not waiting
        assert not engine.aborted[first].is_set()


# Held up by us.


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
async def test_running_out_of_wall_time_without_an_engine_is_an_infra_failure_not_an_exhausted_budget(
    model_dir: Path, wire: Wire
) -> None:
    async with world(model_dir, held_after_s=0.01) as w:
        await w.gateway.close_gate(EngineId("e0"), lease_s=60)
        reply = await (await w.client(wire, spec={"budgets": Budgets(wall_s=2)})).say("go")
        assert (reply.status, reply.text) == (200, Budgets().final_text), "the agent still gets its normal end"
        assert (await w.finish()).failures[0].startswith("held")


async def test_an_agent_that_disconnects_from_a_held_turn_marks_the_session(model_dir: Path) -> None:
    async with world(model_dir, held_after_s=0.1) as w:
        await w.gateway.close_gate(EngineId("e0"), lease_s=60)
        client = await w.client()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await client.say("go")
        assert (await w.finish()).failures[0].startswith("held")


async def test_an_agent_that_disconnects_at_once_does_not_mark_the_session(model_dir: Path) -> None:
    async with world(model_dir, held_after_s=60) as w:
        await w.gateway.close_gate(EngineId("e0"), lease_s=60)
        client = await w.client()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.say("go")
        report = await w.finish()
        assert (report.failures, report.sampled_tokens, report.turns) == ((), 0, 0)


# Telling.


async def test_turn_spans_are_children_of_the_rollout(model_dir: Path, tmp_path: Path) -> None:
    telemetry = configure(TelemetryConfig(), process="gateway", spans_dir=tmp_path, install=False)
    tracer = telemetry.tracer("test")
    async with world(model_dir, Lines(Fault.ERROR), LS, tracer=tracer) as w:
        root = start_rollout_span(tracer, "rollout-1", 1)
        reply = await (await w.client(spec={"traceparent": traceparent_of(root)})).say("go")
        root.end()
        named = [[tuple(header.split("-")[1:3]) for header in engine.traceparents] for engine in w.engines]
    telemetry.shutdown()
    spans = list(SpanFolder(tmp_path).spans())
    assert {span["trace_id"] for span in spans} == {f"{trace_id_for('', 'rollout-1', 1):032x}"}
    [turn] = [span for span in spans if span["name"] == "chat"]
    by_name = {span["name"]: span for span in spans}
    assert turn["parent_id"] == by_name["rollout"]["span_id"]
    engines = [span for span in spans if span["name"] == "engine"]
    assert [span["attributes"]["headrace.engine.id"] for span in engines] == ["e0", "e1"]
    assert {span["parent_id"] for span in engines} == {turn["span_id"]}
    calls = [[(span["trace_id"], span["span_id"])] for span in engines]
    assert named == calls, "each engine is told which span calls it"
    assert turn["trace_id"].encode() not in reply.raw, "and the agent is not"
    assert turn["attributes"]["headrace.render_s"] > 0
    assert not [name for span in engines for name in span["attributes"] if name.startswith("gen_ai.usage.")]
    cached = engines[1]["attributes"]["headrace.engine.cached_tokens"]
    assert turn["attributes"]["gen_ai.usage.cache_read.input_tokens"] == cached
    assert turn["attributes"]["gen_ai.usage.output_tokens"] == len(w.engines[1].sampled[0].output_ids)
    assert engines[1]["attributes"]["gen_ai.response.finish_reasons"] == ["stop"]
    assert engines[1]["attributes"]["headrace.versions"] == ["1.4"]
    assert engines[0]["events"][0]["name"] == "exception"


async def test_an_invalid_trace_context_is_ignored(model_dir: Path) -> None:
    async with world(model_dir) as w:
        assert (await (await w.client(spec={"traceparent": "00-zz-\n"})).say("go")).status == 200


async def test_a_short_admin_token_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        Gateway(GatewayConfig(), "short")


async def test_a_gateway_that_cannot_start_reports_the_reason(model_dir: Path) -> None:
    gateway = Gateway(GatewayConfig(tokenizer_dir=model_dir), ADMIN)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError) as refused:
            await gateway.start(port=taken.getsockname()[1])
    assert refused.value.errno == errno.EADDRINUSE
    with pytest.raises(ParserUnknown, match="no parser 'klingon'"):
        await Gateway(GatewayConfig(tokenizer_dir=model_dir, parser="klingon"), ADMIN).start()
    async with gateway:
        assert await gateway.in_flight()


async def test_a_session_reports_where_its_time_went(model_dir: Path) -> None:
    call = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
    async with world(model_dir, Lines(call, "Done.")) as w:
        client = await w.client(ANTHROPIC, tools=("bash",))
        reply = await client.say("go")
        await client.give((reply.calls[0][0], "output"))
        usage = (await w.finish()).usage
    assert (usage.engines, usage.tools) == (("e0",), ("bash",))
    assert {part for part, _, _ in usage.segments} >= {"render", "engine", "record", "tool.bash", "own"}
    assert "engine.decode" not in {part for part, _, _ in usage.segments}, "this engine reports no times"
    ends = [0.0, *(end for _, _, end in reversed(usage.segments))]
    starts = [start for _, start, _ in reversed(usage.segments)]
    assert ends[1:] == [ends[0], *starts[:-1]], "without gaps, up to the report"
    assert usage.prompt_tokens == sum(len(one.prompt_ids) for one in w.engines[0].sampled)
