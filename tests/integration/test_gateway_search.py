"""An agent with inline search over real HTTP: continued turns, stop strings exact to the token, token counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from headrace.policies.tokens.chat_template import Ending
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets
from headrace.serve.gateway.conversation import Message, ToolSpec
from headrace.serve.gateway.http.config import GatewayConfig
from headrace.serve.gateway.http.gateway import Gateway
from headrace.serve.gateway.rendering.render import Renderer, TokenIds
from support.chat_templates import QWEN25
from support.gateway_rig import (
    ADMIN,
    ANTHROPIC,
    CHAT,
    GUARD_S,
    Client,
    Engine,
    Lines,
    Wire,
    World,
    renderer_of,
    soon,
    table_of,
)
from support.gateway_rig import world as any_world
from support.scripted_engine import ScriptedEngine

SEARCH, ANSWER = "I look. <search>moss</search>", "So: <answer>green</answer>"
FOUND = "\n\n<information>Moss is green.</information>\n\n"
STOPS = {"stop": ["</search>", "</answer>"], "include_stop_str_in_output": True}
ASKED = {"role": "user", "content": "What colour is moss?"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A template that can leave a message open."""
    return QWEN25.write(tmp_path_factory.mktemp("qwen2.5"))


class RunsOn(Engine):
    """Engine that samples its whole script, whatever the stop strings."""

    def _reply(
        self, body: dict[str, Any], prompt: str, text: str, ids: list[int], finish: Mapping[str, Any]
    ) -> web.Response:
        return ScriptedEngine._reply(self, body, prompt, text, ids, finish)


@asynccontextmanager
async def world(model_dir: Path, *lines: str, **config: Any) -> AsyncIterator[World]:
    async with any_world(model_dir, Lines(*(lines or ("ls",))), **config) as w:
        yield w


async def choice_of(client: Client, **fields: Any) -> dict[str, Any]:
    """Ask with stop strings, and return the choice of the answer."""
    reply = await client.send(client.body(**({"messages": [ASKED]} | STOPS | fields)))
    assert reply.status == 200, reply.raw
    document = client.wire.fold(reply.raw) if client.stream else json.loads(reply.raw)
    choice: dict[str, Any] = document["choices"][0]
    return choice


def continued(text: str) -> dict[str, Any]:
    return {"messages": [ASKED, {"role": "assistant", "content": text}], "continue_final_message": True}


def check(report: SessionReport, engine: Engine) -> None:
    """One row is what the engine was sent last and sampled then, up to its stop strings."""
    assert report.sampled_tokens == sum(len(one.output_ids) for one in engine.sampled)
    assert report.sampled_tokens == report.trained_tokens + sum(report.masked.values())
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    tokens, mask, place = row.tokens_T.tolist(), row.loss_mask_T.tolist(), 0
    for one in engine.sampled:
        assert tokens[: len(one.prompt_ids)] == list(one.prompt_ids)
        assert not any(mask[place : len(one.prompt_ids)])
        place = len(one.prompt_ids)
        while place < len(tokens) and mask[place]:
            assert tokens[place] == one.output_ids[place - len(one.prompt_ids)]
            place += 1
    assert place == len(tokens) or report.masked.get("stop_border")


@pytest.mark.parametrize("engine_type", [Engine, RunsOn])
async def test_F15_an_inline_search_is_one_row(model_dir: Path, engine_type: type[Engine]) -> None:
    """F15: the engine may run on after the closing tag."""
    lines = (f"{SEARCH} said and more", f"Again. {SEARCH}</search>", f"{ANSWER} and so on")
    async with world(model_dir, *lines, engine_type=engine_type) as w:
        [engine] = w.engines
        client = await w.client(system="")
        first = await choice_of(client)
        assert (first["message"]["content"], first["finish_reason"], first["stop_reason"]) == (
            SEARCH,
            "stop",
            "</search>",
        )
        text = SEARCH + FOUND
        second = await choice_of(client, **continued(text), add_generation_prompt=False)
        assert second["message"]["content"] == f"Again. {SEARCH}"
        text += second["message"]["content"] + FOUND
        third = await choice_of(client, **continued(text))
        assert (third["message"]["content"], third["stop_reason"]) == (ANSWER, "</answer>")
        report = await w.finish()
        check(report, engine)
        assert (report.turns, report.rerendered, report.drift, report.failures) == (3, 0, {}, ())
        assert engine.sampled[2].prompt.endswith(text)
        if engine_type is Engine:
            assert report.masked == {}
        else:
            assert set(report.masked) == {"overrun"}
        assert report.trajectory is not None
        [row] = report.trajectory.rows
        trained = engine.tokenizer.decode(row.tokens_T[row.loss_mask_T].tolist(), skip_special_tokens=False)
        assert trained == f"{SEARCH}Again. {SEARCH}{ANSWER}"


@pytest.mark.parametrize("wire", [CHAT, ANTHROPIC], ids=lambda wire: wire.name)
@pytest.mark.parametrize("stream", [False, True])
async def test_F15_a_turn_ends_with_its_stop_string_on_every_wire(model_dir: Path, wire: Wire, stream: bool) -> None:
    async with world(model_dir, f"{SEARCH} and more", "ok", engine_type=RunsOn) as w:
        [engine] = w.engines
        client = await w.client(wire, stream=stream)
        name = "stop" if wire is CHAT else "stop_sequences"
        reply = await client.say("go", **{name: ["</search>"]})
        assert reply.text == SEARCH.removesuffix("</search>")
        assert reply.output_tokens == len(engine.sampled[0].output_ids)
        if wire is ANTHROPIC:
            assert (reply.end, reply.stop_string) == ("stop_sequence", "</search>")
        else:
            assert b'"stop_reason":"</search>"' in reply.raw
        await client.say("on")
        assert engine.sampled[1].prompt.count(f"{SEARCH}<|im_end|>\n<|im_start|>user\non") == 1
        report = await w.finish()
        check(report, engine)
        assert set(report.masked) == {"overrun"}


async def test_F15_a_stop_string_that_ends_inside_a_token_masks_its_turn(model_dir: Path) -> None:
    async with world(model_dir, "What: file", "ok", engine_type=RunsOn) as w:
        [engine] = w.engines
        client = await w.client(system="")
        assert engine.tokenizer.token_to_id("\u0120file") in engine.encode("What: file")
        first = await choice_of(client, stop=[" fi"])
        assert first["message"]["content"] == "What: fi"
        await choice_of(client, **continued("What: fi, then"))
        report = await w.finish()
        assert report.masked == {"stop_border": len(engine.encode("What: file")), "overrun": 1}
        assert report.trained_tokens == len(engine.sampled[1].output_ids)
        assert engine.sampled[1].prompt.endswith("What: file, then")


async def test_a_killed_gateway_continues_a_message(model_dir: Path, tmp_path: Path) -> None:
    async with world(
        model_dir, f"{SEARCH} and more", f"{SEARCH} more", ANSWER, session_log_dir=tmp_path, engine_type=RunsOn
    ) as w:
        client = await w.client(system="")
        await choice_of(client)
        text = SEARCH + FOUND
        await choice_of(client, **continued(text))
        await w.gateway.stop()
        port = int(w.url.rsplit(":", 1)[1])
        settings = GatewayConfig(tokenizer_dir=model_dir, session_log_dir=tmp_path, abort_grace_s=10.0)
        gateway = Gateway(settings, ADMIN, renderer=renderer_of(model_dir))
        await gateway.start(port=port)
        try:
            assert await gateway.set_engines(table_of(w.engines))
            repeated = await choice_of(replace(client, headers={"x-stainless-retry-count": "1"}), **continued(text))
            assert (repeated["message"]["content"], len(w.engines[0].requests)) == (SEARCH, 2)
            last = await choice_of(client, **continued(text + SEARCH + FOUND))
            assert last["message"]["content"] == ANSWER
            report = await w.finish()
        finally:
            await gateway.stop()
        check(report, w.engines[0])
        assert (report.turns, report.rerendered, set(report.masked)) == (3, 0, {"overrun"})


async def test_a_first_request_leaves_the_message_open(model_dir: Path) -> None:
    async with world(model_dir, SEARCH) as w:
        client = await w.client(system="")
        await choice_of(client, **continued("Well,"))
        assert w.engines[0].sampled[0].prompt.endswith("<|im_start|>assistant\nWell,")


async def test_a_template_that_rewrites_the_message_refuses_it(tmp_path: Path) -> None:
    from support.chat_templates import QWEN3

    async with world(QWEN3.write(tmp_path), SEARCH, ANSWER) as w:
        client = await w.client(system="")
        refused = await client.send(client.body(**continued("Well,")))
        assert (refused.status, refused.error["param"]) == (400, "continue_final_message")
        assert "cannot be left open" in refused.error["message"]
        await choice_of(client)
        await choice_of(client, **continued(SEARCH + FOUND))
        check(await w.finish(), w.engines[0])


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [
        ([ASKED], {}, "must be the assistant's"),
        ([ASKED, {"role": "assistant", "content": "a"}], {"add_generation_prompt": True}, "cannot both be true"),
        (
            [
                ASKED,
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "x", "arguments": "{}"}}]},
            ],
            {},
            "tool calls",
        ),
        ([ASKED, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}], {}, "into one"),
    ],
)
async def test_a_message_that_cannot_be_continued_is_refused(
    model_dir: Path, messages: list[Any], fields: dict[str, Any], reason: str
) -> None:
    async with world(model_dir) as w:
        client = await w.client()
        body = client.body(messages=messages, continue_final_message=True, **fields)
        refused = await client.send(body)
        assert (refused.status, refused.error["param"]) == (400, "continue_final_message")
        assert reason in refused.error["message"]


# Token counts.


async def count(client: Client, **body: Any) -> tuple[int, dict[str, Any]]:
    async with client.http.post(f"{client.base_url}/v1/tokenize", json=body) as response:
        return response.status, await response.json()


async def test_tokenize_counts_a_fresh_prompt_and_spends_nothing(model_dir: Path) -> None:
    async with world(model_dir) as w:
        client = await w.client(system="", tools=("bash",), spec={"budgets": Budgets(max_turns=1)})
        body = client.body(messages=[ASKED])
        tools = body["tools"]
        for _ in range(3):
            status, document = await count(client, model="m", messages=[ASKED], tools=tools)
        assert (status, document["max_model_len"]) == (200, 32768)
        reply = await client.send(body)
        assert reply.input_tokens == document["count"] == len(document["tokens"])
        assert document["tokens"] == list(w.engines[0].sampled[0].prompt_ids)
        shown = [ASKED, {"role": "assistant", "content": "a"}]
        opened = (await count(client, messages=shown, continue_final_message=True))[1]["tokens"]
        closed = (await count(client, messages=shown, add_generation_prompt=False))[1]["tokens"]
        assert closed[: len(opened)] == opened
        assert w.engines[0].tokenizer.decode(closed[len(opened) :], skip_special_tokens=False) == "<|im_end|>\n"
        report = await w.finish()
        assert (report.turns, report.exhausted, report.failures) == (1, "", ())


async def test_tokenize_counts_a_plain_text(model_dir: Path) -> None:
    async with world(model_dir) as w:
        client = await w.client()
        status, document = await count(client, prompt=FOUND)
        expected = w.engines[0].tokenizer.encode(FOUND, add_special_tokens=False).ids
        assert (status, document["tokens"], document["count"]) == (200, expected, len(expected))
        assert (await count(client, prompt=""))[1]["count"] == 0


@pytest.mark.parametrize(
    "body", [{"prompt": "x " * 10_000}, {"messages": [{"role": "user", "content": "x " * 10_000}]}]
)
async def test_tokenize_refuses_texts_far_longer_than_the_context(model_dir: Path, body: dict[str, Any]) -> None:
    async with world(model_dir) as w:
        client = await w.client(spec={"budgets": Budgets(max_context_tokens=60)})
        status, document = await count(client, **body)
        assert (status, document["error"]["code"]) == (400, "context_length_exceeded")
        assert (await w.finish()).exhausted == ""


@pytest.mark.parametrize(
    ("body", "field"),
    [({}, "messages"), ({"messages": []}, "messages"), ({"prompt": 5}, "prompt"), ({"messages": 5}, "messages")],
)
async def test_tokenize_refuses_invalid_bodies(model_dir: Path, body: dict[str, Any], field: str) -> None:
    async with world(model_dir) as w:
        status, document = await count(await w.client(), **body)
        assert (status, document["error"]["param"]) == (400, field)
        client = await w.client(session_id="other")
        client.base_url = f"{w.url}/s/unknown"
        assert (await count(client, prompt="x"))[0] == 400


class HeldRenderer:
    """Renderer whose `render` of a long text waits for the test."""

    def __init__(self, renderer: Renderer, held: asyncio.Event) -> None:
        self._renderer, self._loop, self._held = renderer, asyncio.get_running_loop(), held
        self.may_end = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec], ending: Ending) -> TokenIds:
        if len(messages[-1].text) > 1000:
            self._loop.call_soon_threadsafe(self._held.set)
            # On the event loop, this would wait for itself.
            asyncio.run_coroutine_threadsafe(self.may_end.wait(), self._loop).result(GUARD_S)
        return self._renderer.render(messages, tools, ending)


async def test_a_long_text_is_tokenized_outside_the_event_loop(model_dir: Path) -> None:
    held = asyncio.Event()
    renderer = HeldRenderer(renderer_of(model_dir), held)
    async with any_world(model_dir, renderer=renderer) as w:  # type: ignore[arg-type]
        client, other = await w.client(), await w.client(session_id="other")
        async with asyncio.TaskGroup() as group:
            counted = group.create_task(count(client, messages=[{"role": "user", "content": "moss " * 10_000}]))
            await soon(held)
            assert (await other.say("go")).status == 200
            renderer.may_end.set()
        status, document = counted.result()
        assert status == 200
        assert document["count"] > 10_000
