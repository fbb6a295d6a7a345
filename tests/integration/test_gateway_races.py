"""Races between the ends of sessions, turns and renders, and between trained and served model names."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.capture.session import Budgets
from headrace.serve.gateway.conversation import Message, ToolSpec
from headrace.serve.gateway.http.config import ModelUse
from headrace.serve.gateway.http.turns import MAX_FAILURES
from headrace.serve.gateway.rendering.render import Renderer, TokenIds
from support.gateway_rig import ADMIN, ANTHROPIC, CHAT, GUARD_S, WIRES, Lines, Wire, World, renderer_of, soon, world
from support.scripted_engine import Fault, check_exact

SIDE = {"model_policy": (("*haiku*", ModelUse.SERVE),)}
EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)


async def delete(w: World, session_id: str) -> int:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    async with w.http.delete(f"{w.url}/sessions/{session_id}", headers=headers) as response:
        return response.status


async def all_read(w: World) -> None:
    """Wait until the gateway has seen everything sent or closed before, which it reads in order."""
    for _ in range(3):
        async with w.http.get(f"{w.url}/healthz") as response:
            assert response.status == 200


# Ends of sessions.


@EVERY
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_deleting_a_session_ends_its_running_turn(model_dir: Path, wire: Wire, stream: bool) -> None:
    async with world(model_dir, Lines(Fault.HANG, "fine"), ping_s=60.0) as w:
        [engine] = w.engines
        client = await w.client(wire, stream=stream)
        async with asyncio.TaskGroup() as group:
            turn = group.create_task(client.say("go"))
            await soon(engine.asked)
            assert await delete(w, "rollout-1") == 204
        assert (turn.result().status, "closed" in turn.result().error["message"]) == (400, True)
        assert engine.aborted[engine.requests[0]["rid"]].is_set()
        assert await delete(w, "rollout-1") == 400
        again = await w.client(wire, stream=stream)
        assert (await again.say("go")).text == "fine"
        report = await w.finish()
        assert (report.turns, report.masked, report.failures) == (1, {}, ())


async def test_a_session_finished_and_deleted_concurrently_is_removed(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines("said", Fault.HANG), session_log_dir=tmp_path) as w:
        [engine] = w.engines
        client = await w.client()
        await client.say("go")
        async with asyncio.TaskGroup() as group:
            engine.asked.clear()
            engine.may_abort.clear()
            turn = group.create_task(client.say("on"))
            await soon(engine.asked)
            finishing = group.create_task(w.post("/sessions/rollout-1/finish"))
            await soon(engine.abort_asked)
            deleting = group.create_task(delete(w, "rollout-1"))
            await all_read(w)
            engine.may_abort.set()
        assert turn.result().status == 400
        status, report = finishing.result()
        assert (status, report["turns"]) == (200, 1)
        assert deleting.result() in (204, 400)
        assert (await w.gateway.in_flight()).sessions == 0


async def test_requests_after_the_final_answer_do_not_grow_the_log(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, session_log_dir=tmp_path) as w:
        client = await w.client(spec={"budgets": Budgets(max_turns=1, final_text="over")})
        await client.say("go")
        assert (await client.say("on")).text == "over"
        before = size_of_logs(tmp_path)
        for _ in range(10):
            assert (await client.say("and on")).text == "over"
        assert size_of_logs(tmp_path) == before


async def test_endless_requests_to_a_broken_engine_do_not_grow_the_log(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines(Fault.ERROR), session_log_dir=tmp_path) as w:
        client = await w.client()
        client.history += client.wire.user("go")
        for _ in range(MAX_FAILURES):
            assert (await client.send(client.body())).status == 503
        before = size_of_logs(tmp_path)
        assert (await client.send(client.body())).status == 503
        assert size_of_logs(tmp_path) == before
        assert len((await w.finish()).failures) == MAX_FAILURES


def size_of_logs(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


# Renders.


class SlowRenderer:
    """Renderer whose first conversation blocks in the render thread until it is released."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self.loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.may_end = threading.Event()
        self.rendered: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ending: Ending) -> TokenIds:
        self.loop.call_soon_threadsafe(self.begun.set)
        assert self.may_end.wait(GUARD_S)
        self.rendered.append(messages[-1].text)
        return self._renderer.render(messages, tools, ending)


async def test_a_session_that_ends_while_its_turn_is_rendered_calls_no_engine(model_dir: Path) -> None:
    renderer = SlowRenderer(renderer_of(model_dir))
    async with world(model_dir, renderer=renderer) as w:  # type: ignore[arg-type]
        client = await w.client(tools=("bash",))
        try:
            async with asyncio.TaskGroup() as group:
                turn = group.create_task(client.say("go"))
                await soon(renderer.begun)
                assert (await w.finish()).sampled_tokens == 0
            assert turn.result().status == 400
        finally:
            renderer.may_end.set()
        other = await w.client(session_id="other", tools=("bash",))
        assert (await other.say("go")).status == 200
        assert len(w.engines[0].requests) == 1


async def test_a_client_that_disconnects_while_its_turn_is_rendered_can_retry(model_dir: Path) -> None:
    renderer = SlowRenderer(renderer_of(model_dir))
    async with world(model_dir, renderer=renderer) as w:  # type: ignore[arg-type]
        client = await w.client(tools=("bash",))
        body = client.body(messages=client.wire.user("go"))
        try:
            first = asyncio.ensure_future(client.send(body))
            await soon(renderer.begun)
            first.cancel()
            await asyncio.wait([first])
            await all_read(w)
            again = asyncio.ensure_future(client.send(body))
        finally:
            renderer.may_end.set()
        assert (await again).text == "ls"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked, len(w.engines[0].requests)) == (1, {}, 1)


@EVERY
async def test_long_arguments_are_rendered_outside_the_event_loop(model_dir: Path, wire: Wire) -> None:
    """The render waits for the test, which waits for the gateway: on the event loop neither would go on."""
    renderer = SlowRenderer(renderer_of(model_dir))
    async with world(model_dir, renderer=renderer) as w:  # type: ignore[arg-type]
        client, other = await w.client(wire), await w.client(session_id="other")
        client.history += history_with_call(wire, {"data": [[[0]]] * 4000})
        try:
            async with asyncio.TaskGroup() as group:
                turn = group.create_task(client.send(client.body()))
                await soon(renderer.begun)
                await all_read(w)
                assert len(w.engines[0].requests) == 0
                renderer.may_end.set()
            assert turn.result().status == 200
        finally:
            renderer.may_end.set()
        assert (await other.say("go")).status == 200


@EVERY
async def test_arguments_far_longer_than_the_context_are_refused_before_rendering(model_dir: Path, wire: Wire) -> None:
    renderer = SlowRenderer(renderer_of(model_dir))
    async with world(model_dir, renderer=renderer, max_context_tokens=32768) as w:  # type: ignore[arg-type]
        client = await w.client(wire)
        client.history += history_with_call(wire, {"data": [[[0]]] * 100_000})
        reply = await client.send(client.body())
        assert (reply.status, renderer.rendered, w.engines[0].requests) == (400, [], [])
        assert re.search("prompt is too long|maximum context length is 32768 tokens", reply.error["message"])
        assert (await w.finish()).exhausted == "context"


def history_with_call(wire: Wire, arguments: dict[str, Any]) -> list[Any]:
    """A conversation whose second message is a call of an agent's own."""
    text = json.dumps(arguments)
    called: dict[str, list[Any]] = {
        "anthropic": [
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "bash", "input": arguments}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "done"}]},
        ],
        "chat": [
            {
                "role": "assistant",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "bash", "arguments": text}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "done"},
        ],
        "responses": [
            {"type": "function_call", "call_id": "a", "name": "bash", "arguments": text},
            {"type": "function_call_output", "call_id": "a", "output": "done"},
        ],
    }
    return [*wire.user("go"), *called[wire.name]]


async def test_a_session_with_many_renders_delays_other_sessions_by_at_most_one_render(model_dir: Path) -> None:
    """Megabytes of tools take seconds each, in the one render thread."""
    renderer = SlowRenderer(renderer_of(model_dir))
    async with world(model_dir, renderer=renderer) as w:  # type: ignore[arg-type]
        greedy, other = await w.client(tools=("bash",)), await w.client(session_id="other", tools=("bash",))
        async with asyncio.TaskGroup() as group:
            for text in ("one", "two", "three"):
                group.create_task(greedy.send(greedy.body(messages=greedy.wire.user(text))))
                await soon(renderer.begun)
            await all_read(w)
            group.create_task(other.send(other.body(messages=other.wire.user("other"))))
            await all_read(w)
            renderer.may_end.set()
        assert renderer.rendered[0] == "one"
        assert renderer.rendered[1] == "other"


# The same words under two names.


@pytest.mark.parametrize("names", [("haiku", "opus"), ("opus", "haiku")], ids=lambda names: names[0])
async def test_the_same_request_under_a_model_name_with_another_use_is_a_separate_turn(
    model_dir: Path, names: tuple[str, str]
) -> None:
    """A served turn must not be returned, or masked, in place of a trained one."""
    async with world(model_dir, Lines("one", "another"), **SIDE) as w:
        client = await w.client(ANTHROPIC)
        body = client.body(messages=client.wire.user("go"))
        said = [(await client.send(body | {"model": name})).text for name in names]
        assert said == ["one", "another"]
        report = await w.finish()
        check_exact(report, w.engines)
        lengths = {name: len(one.output_ids) for name, one in zip(names, w.engines[0].sampled, strict=True)}
        assert (report.trained_tokens, report.masked) == (lengths["opus"], {"side": lengths["haiku"]})


async def test_concurrent_identical_requests_for_different_model_uses_are_separate_turns(model_dir: Path) -> None:
    async with world(model_dir, Lines("one", "another"), **SIDE) as w:
        [engine] = w.engines
        client = await w.client(CHAT)
        body = client.body(messages=client.wire.user("go"))
        engine.may_answer.clear()
        async with asyncio.TaskGroup() as group:
            asking = [group.create_task(client.send(body | {"model": name})) for name in ("haiku", "opus")]
            while engine.running < 2:
                engine.asked.clear()
                await soon(engine.asked)
            engine.may_answer.set()
        assert {task.result().text for task in asking} == {"one", "another"}
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, set(report.masked)) == (2, {"side"})
        assert report.trained_tokens > 0
