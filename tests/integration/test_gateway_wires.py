"""Three dialects for one session: the same tokens, correct usage, and each dialect's own stop reasons."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.serve.gateway.capture.session import FINAL_TEXT, Budgets, Sampling
from headrace.serve.gateway.http.config import ModelUse
from headrace.serve.gateway.parsing.parser_choice import BATCH_TURNS
from support.gateway_rig import ANTHROPIC, CHAT, RESPONSES, WIRES, Client, Lines, Wire, World, call_text, soon, world
from support.scripted_engine import Fault, check_exact
from support.wires import read_events

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
EITHER = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
TURNS = (
    "<think>\nI should look.\n</think>\n\nI look.\n" + call_text("bash", command="ls  é"),
    call_text("bash", command="a") + "\n" + call_text("edit", path="x", replace_all=False),
    "Half of it is\n\ndone.  ",
    "All of it.",
)


async def play(client: Client) -> None:
    """Play four turns, with a call, two parallel calls, and text."""
    reply = await client.say("mend it")
    assert [name for _, name, _ in reply.calls] == ["bash"]
    reply = await client.give((reply.calls[0][0], "a.txt"))
    assert [name for _, name, _ in reply.calls] == ["bash", "edit"]
    assert reply.calls[1][2] == {"path": "x", "replace_all": False}
    reply = await client.give((reply.calls[0][0], "done"), (reply.calls[1][0], ""))
    assert "done." in reply.text
    assert (await client.say("go on")).text == "All of it."


async def test_the_same_engine_gives_the_same_tokens_in_every_dialect(model_dir: Path) -> None:
    seen = {}
    for wire in WIRES:
        for stream in (False, True):
            async with world(model_dir, Lines(*TURNS)) as w:
                await play(await w.client(wire, stream=stream, tools=("bash", "edit")))
                report = await w.finish()
                check_exact(report, w.engines)
                assert (report.turns, report.rerendered, report.masked, report.lost_calls) == (4, 0, {}, 0)
                assert report.trajectory is not None
                [row] = report.trajectory.rows
                seen[wire.name, stream] = (
                    [one.prompt_ids for one in w.engines[0].sampled],
                    row.tokens_T.tolist(),
                    row.loss_mask_T.tolist(),
                    row.logprobs_T.tolist(),
                )
    first = seen["anthropic", False]
    assert all(tokens == first for tokens in seen.values())


# Numbers.


@EVERY
@EITHER
async def test_usage_counts_the_engines_prompt_and_sampled_tokens(model_dir: Path, wire: Wire, stream: bool) -> None:
    async with world(model_dir, Lines(*TURNS)) as w:
        client = await w.client(wire, stream=stream, tools=("bash",))
        replies = [await client.say("mend it"), await client.say("on"), await client.say("and on")]
        for reply, sampled in zip(replies, w.engines[0].sampled, strict=True):
            assert reply.input_tokens == len(sampled.prompt_ids)
            assert reply.output_tokens == len(sampled.output_ids)
        if wire is ANTHROPIC and stream:
            [start] = [data for name, data in read_events(replies[2].raw) if name == "message_start"]
            assert start["message"]["usage"]["input_tokens"] == len(w.engines[0].sampled[2].prompt_ids)


async def count(client: Client, body: dict[str, Any]) -> Any:
    async with client.http.post(f"{client.base_url}/v1/messages/count_tokens", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["input_tokens"]


async def test_count_tokens_is_the_length_of_the_prompt_that_follows(model_dir: Path) -> None:
    async with world(model_dir, Lines(*TURNS)) as w:
        client = await w.client(ANTHROPIC, tools=("bash", "edit"))
        counted = []
        for text in ("mend it", "on", "and " * 300):
            body = client.body(messages=[*client.history, *ANTHROPIC.user(text)])
            counted.append(await count(client, body))
            await client.say(text)
        assert counted == [len(one.prompt_ids) for one in w.engines[0].sampled]
        # Counting changes nothing.
        assert (await count(client, client.body(messages=client.history[:1]))) == counted[0]
        report = await w.finish()
        assert (report.turns, report.rerendered, report.drift.get("text")) == (3, 0, None)


async def test_count_tokens_accepts_an_assistant_message_at_the_end(model_dir: Path) -> None:
    async with world(model_dir) as w:
        client = await w.client(ANTHROPIC)
        await client.say("go")
        [sampled] = w.engines[0].sampled
        counted = await count(client, client.body())
        assert counted > len(sampled.prompt_ids) + len(sampled.output_ids)
        async with w.http.post(f"{client.base_url}/v1/messages", json=client.body()) as response:
            assert response.status == 400, "an answer cannot be prefilled"


async def test_count_tokens_needs_a_session_and_a_body(model_dir: Path) -> None:
    async with world(model_dir) as w:
        client = await w.client(ANTHROPIC)
        for base, body in ((w.url, b'{"messages": []}'), (client.base_url, b"{"), (client.base_url, b"[]")):
            async with w.http.post(f"{base}/v1/messages/count_tokens", data=body) as response:
                assert (response.status, (await response.json())["type"]) == (400, "error")


# How a turn ended.

WORDS = {
    "anthropic": {"stop": "end_turn", "calls": "tool_use", "length": "max_tokens"},
    "chat": {"stop": "stop", "calls": "tool_calls", "length": "length"},
    "responses": {"stop": "completed", "calls": "completed", "length": "incomplete"},
}


@EVERY
@EITHER
async def test_every_way_a_turn_ends_has_the_dialects_stop_reason(model_dir: Path, wire: Wire, stream: bool) -> None:
    words = WORDS[wire.name]
    async with world(model_dir, Lines("Well.", call_text("bash", command="ls"), "much too long an answer")) as w:
        client = await w.client(wire, stream=stream, tools=("bash",))
        assert (await client.say("go")).end == words["stop"]
        reply = await client.say("look")
        assert reply.end == words["calls"]
        reply = await client.give((reply.calls[0][0], "out"), **{wire.limit_field: 3})
        assert (reply.end, reply.output_tokens) == (words["length"], 3)
        await client.say("on")
        report = await w.finish()
        check_exact(report, w.engines)
        assert report.trajectory is not None
        [row] = report.trajectory.rows
        cut = w.engines[0].sampled[2]
        end = len(cut.prompt_ids) + 3
        assert row.loss_mask_T[end - 3 : end].all()
        assert row.tokens_T[end] == w.engines[0].stop_id, "the turn that was cut is closed"
        assert not row.loss_mask_T[end], "by an id that was not sampled"


@pytest.mark.parametrize("wire", [ANTHROPIC, CHAT], ids=["anthropic", "chat"])
@EITHER
async def test_a_stop_string_is_trimmed_from_the_text_but_remains_in_the_ids(
    model_dir: Path, wire: Wire, stream: bool
) -> None:
    field = {"anthropic": "stop_sequences", "chat": "stop"}[wire.name]
    async with world(model_dir, Lines("one two STOP three", "later")) as w:
        client = await w.client(wire, stream=stream)
        reply = await client.say("go", **{field: ["END", "STOP"]})
        assert reply.text == "one two "
        assert reply.end == {"anthropic": "stop_sequence", "chat": "stop"}[wire.name]
        assert reply.stop_string == ("STOP" if wire is ANTHROPIC else None)
        assert reply.output_tokens == len(w.engines[0].encode("one two STOP"))
        assert (await client.say("on", **{field: ["END"]})).text == "later"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.masked, len(report.lineages)) == ({}, 1)


@EVERY
async def test_calls_that_are_not_allowed_remain_text(model_dir: Path, wire: Wire) -> None:
    choice: Any = {"type": "none"} if wire is ANTHROPIC else "none"
    said = call_text("bash", command="ls")
    async with world(model_dir, Lines(said)) as w:
        client = await w.client(wire, tools=("bash",))
        reply = await client.say("go", tool_choice=choice)
        assert (reply.calls, reply.end) == ((), WORDS[wire.name]["stop"])
        assert reply.text.strip() == said


@EVERY
async def test_malformed_markup_remains_text_and_is_counted(model_dir: Path, wire: Wire) -> None:
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"\n</tool_call>'
    async with world(model_dir, Lines("Hm. " + broken, "sorry")) as w:
        client = await w.client(wire, tools=("bash",))
        reply = await client.say("go")
        assert reply.calls == ()
        assert "Hm." in reply.text
        await client.say("that was no call")
        assert (await w.gateway.in_flight()).lost_calls == 1
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.lost_calls, report.masked, len(report.lineages)) == (1, {}, 1)


async def test_a_parser_that_parses_no_calls_is_reported_in_the_statistics(model_dir: Path) -> None:
    async with world(model_dir, Lines("<tool_call>\n<name>bash</name>\n</tool_call>")) as w:
        client = await w.client(CHAT, tools=("bash",))
        for turn in range(BATCH_TURNS):
            assert not (await w.gateway.in_flight()).parser_fails, turn
            await client.say("go")
        assert (await w.gateway.in_flight()).parser_fails


# Budgets and context.


def last_of(w: World) -> dict[str, Any]:
    sampling: dict[str, Any] = w.engines[0].requests[-1]["sampling_params"]
    return sampling


@EVERY
@EITHER
@pytest.mark.parametrize("budget", ["turns", "tokens"])
async def test_an_exhausted_budget_ends_the_agent_with_a_normal_answer(
    model_dir: Path, wire: Wire, stream: bool, budget: str
) -> None:
    budgets = Budgets(max_turns=2) if budget == "turns" else Budgets(max_sampled_tokens=5)
    async with world(model_dir, Lines("abc")) as w:
        client = await w.client(wire, stream=stream, spec={"budgets": budgets}, tools=("bash",))
        await client.say("go")
        await client.say("on")
        if budget == "tokens":
            assert last_of(w)["max_new_tokens"] == 5 - len(w.engines[0].sampled[0].output_ids)
        before = len(w.engines[0].requests)
        for _ in range(2):
            reply = await client.say("more")
            assert (reply.status, reply.text, reply.calls) == (200, FINAL_TEXT, ())
            assert reply.end == WORDS[wire.name]["stop"]
        assert len(w.engines[0].requests) == before == 2
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.exhausted, report.failures) == (2, budget, ())


@EVERY
@EITHER
@pytest.mark.parametrize("final_text", [FINAL_TEXT, ""])
async def test_a_turn_cut_by_the_token_budget_ends_normally(
    model_dir: Path, wire: Wire, stream: bool, final_text: str
) -> None:
    """Codex takes a truncated answer for a failure, and exits with 1. Without a final text a spent budget gives one."""
    async with world(model_dir, Lines("a long answer")) as w:
        budgets = Budgets(max_sampled_tokens=3, max_tokens_per_turn=3, final_text=final_text)
        client = await w.client(wire, stream=stream, spec={"budgets": budgets})
        reply = await client.say("go")
        assert (reply.status, reply.end) == (200, WORDS[wire.name]["stop" if final_text else "length"])
        assert len(w.engines[0].sampled[0].output_ids) == 3
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.exhausted, report.masked, report.lost_calls) == ("tokens", {}, 0)


@EVERY
@EITHER
async def test_the_final_text_may_be_empty(model_dir: Path, wire: Wire, stream: bool) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire, stream=stream, spec={"budgets": Budgets(max_turns=1, final_text="")})
        await client.say("go")
        reply = await client.say("on")
        assert (reply.status, reply.text, reply.end) == (200, "", WORDS[wire.name]["length"])


@EVERY
@EITHER
async def test_running_out_of_wall_time_aborts_the_running_turn_and_ends_it_normally(
    model_dir: Path, wire: Wire, stream: bool
) -> None:
    async with world(model_dir, Lines(Fault.HANG), ping_s=0.05) as w:
        [engine] = w.engines
        client = await w.client(wire, stream=stream, spec={"budgets": Budgets(wall_s=1.5)})
        reply = await client.say("go")
        assert (reply.status, reply.text, reply.end) == (200, FINAL_TEXT, WORDS[wire.name]["stop"])
        assert engine.aborted[engine.requests[0]["rid"]].is_set()
        assert (await client.say("on")).text == FINAL_TEXT
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.exhausted, report.masked, report.failures) == ("wall", {"aborted": 1}, ())


@EVERY
async def test_a_turn_that_the_clock_cut_is_trained_if_configured(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, Lines(Fault.HANG), ping_s=0.05) as w:
        client = await w.client(wire, spec={"budgets": Budgets(wall_s=1.5), "train_cut": True})
        reply = await client.say("go")
        assert (reply.status, reply.text) == (200, FINAL_TEXT)
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.exhausted, report.masked, report.failures) == ("wall", {}, ())
        assert (report.turns, report.trained_tokens) == (1, 1)


@EVERY
async def test_turns_in_flight_count_towards_the_budget(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        [engine] = w.engines
        engine.may_answer.clear()
        client = await w.client(wire, spec={"budgets": Budgets(max_turns=1)})
        async with asyncio.TaskGroup() as group:
            first = group.create_task(client.send(client.body(**question(wire, "one"))))
            await soon(engine.asked)
            assert (await client.send(client.body(**question(wire, "two")))).text == FINAL_TEXT
            engine.may_answer.set()
        assert first.result().text == "ls"
        assert (await w.finish()).turns == 1


def question(wire: Wire, text: str) -> dict[str, Any]:
    """Return the body fields of a conversation with one message."""
    return {"input" if wire is RESPONSES else "messages": wire.user(text)}


@EVERY
@EITHER
async def test_the_remaining_context_limits_the_sampled_tokens(model_dir: Path, wire: Wire, stream: bool) -> None:
    async with world(model_dir, Lines("much too long an answer")) as w:
        probe = await w.client(wire, session_id="probe")
        prompt = (await probe.say("go")).input_tokens
        client = await w.client(wire, stream=stream, spec={"budgets": Budgets(max_context_tokens=prompt + 2)})
        reply = await client.say("go", **{wire.limit_field: 64_000})
        assert (reply.end, reply.output_tokens) == (WORDS[wire.name]["length"], 2)
        assert last_of(w)["max_new_tokens"] == 2
        _, document = await w.post("/sessions/rollout-1/finish")
        assert [row["truncated"] for row in document["rows"]] == [True]
        assert (document["masked"]["truncated"], document["trained_tokens"]) == (0, 2)


async def test_turns_cut_by_the_context_are_not_trained_if_configured(model_dir: Path) -> None:
    async with world(model_dir, Lines("much too long an answer")) as w:
        prompt = (await (await w.client(session_id="probe")).say("go")).input_tokens
        budgets = Budgets(max_context_tokens=prompt + 2)
        await (await w.client(spec={"budgets": budgets, "train_truncated": False})).say("go")
        report = await w.finish()
        assert (report.masked, report.trained_tokens, len(report.lineages)) == ({"truncated": 2}, 0, 1)


@EVERY
@EITHER
@pytest.mark.parametrize("length", [60, 40_000], ids=["rendered", "hopeless"])
async def test_context_exceeded_is_worded_so_that_agents_compact(
    model_dir: Path, wire: Wire, stream: bool, length: int
) -> None:
    async with world(model_dir) as w:
        budgets = Budgets(max_context_tokens=64)
        client = await w.client(wire, stream=stream, spec={"budgets": budgets})
        text = "word " * length
        if wire is RESPONSES and stream:
            async with w.http.post(client.base_url + wire.path, json=client.body(**question(wire, text))) as response:
                assert response.status == 200
                events = read_events(await response.read())
            name, last = events[-1]
            assert (name, last["response"]["error"]["code"]) == ("response.failed", "context_length_exceeded")
            message = last["response"]["error"]["message"]
        else:
            reply = await client.send(client.body(**question(wire, text)))
            assert reply.status == 400
            message = reply.error["message"]
            if wire is ANTHROPIC:
                assert reply.error["type"] == "invalid_request_error"
            else:
                assert reply.error["code"] == "context_length_exceeded"
        if wire is ANTHROPIC:
            found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", message)
        else:
            found = re.match(
                r"This model's maximum context length is (?P<limit>\d+) tokens\. .* resulted in (\d+) tokens", message
            )
        assert found is not None, message
        numbers = sorted(int(number) for number in found.groups())
        assert numbers[0] == 64 < numbers[1]
        assert w.engines[0].requests == []
        report = await w.finish()
        assert (report.exhausted, report.trajectory, report.failures) == ("context", None, ())


async def test_a_session_over_its_context_can_continue_with_a_shorter_history(model_dir: Path) -> None:
    """As after a compaction: the refusal of one request ends nothing."""
    async with world(model_dir) as w:
        client = await w.client(ANTHROPIC, spec={"budgets": Budgets(max_context_tokens=64)})
        assert (await client.send(client.body(**question(ANTHROPIC, "word " * 100)))).status == 400
        assert (await client.say("a summary")).status == 200
        assert (await w.finish()).turns == 1


# Names and what nobody knows.

POLICY = (("*haiku*", ModelUse.SERVE), ("gpt-4*", ModelUse.REFUSE), ("*", ModelUse.TRAIN))


@EVERY
async def test_a_model_name_may_be_trained_served_or_refused(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, model_policy=POLICY) as w:
        client = await w.client(wire, tools=("bash",))
        assert (await client.say("go", model="anything at all")).status == 200
        served = Client(w.http, client.base_url, wire, tools=("bash",), system="You explore.")
        reply = await served.say("explore", model="claude-haiku-4-5-20251001")
        assert reply.status == 200
        reply = await client.send(client.body(**question(wire, "go")) | {"model": "gpt-4o"})
        assert (reply.status, "gpt-4o" in reply.error["message"]) == (400, True)
        report = await w.finish()
        check_exact(report, w.engines)
        trained, side = (len(one.output_ids) for one in w.engines[0].sampled)
        assert (report.turns, report.trained_tokens, report.masked) == (2, trained, {"side": side})


UNKNOWN: dict[str, dict[str, Any]] = {
    "anthropic": {
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "metadata": {"user_id": '{"session_id":"x"}'},
        "service_tier": "auto",
        "temperature": 1.7,
        "top_k": 3,
        "mcp_servers": [],
        "container": None,
        "tools": [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
            {"name": "bash", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}, "eager": True},
        ],
    },
    "chat": {
        "temperature": 2,
        "top_p": 0.1,
        "frequency_penalty": 1.5,
        "logit_bias": {"50256": -100},
        "response_format": {"type": "text"},
        "seed": 7,
        "user": "x",
        "parallel_tool_calls": True,
        "reasoning_effort": "high",
        "provider_specific": {"x": [1, 2]},
        "n": 1,
        "tools": [{"type": "web_search", "x": 1}, {"type": "function", "function": {"name": "bash", "strict": True}}],
    },
    "responses": {
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "x",
        "client_metadata": {"x-codex-turn-metadata": "no json"},
        "parallel_tool_calls": True,
        "text": {"verbosity": "low"},
        "truncation": "auto",
        "tools": [
            {"type": "web_search", "external_web_access": True},
            {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
            {
                "type": "custom",
                "name": "apply_patch",
                "format": {"type": "grammar", "syntax": "lark", "definition": "x"},
            },
            {"type": "image_generation"},
        ],
    },
}


@EVERY
@EITHER
async def test_unknown_fields_and_headers_are_ignored(model_dir: Path, wire: Wire, stream: bool) -> None:
    headers = {
        "anthropic-beta": "a-2099-01-01,b",
        "anthropic-version": "1999",
        "X-Stainless-Retry-Count": "0",
        "OpenAI-Beta": "x",
        "x-codex-turn-metadata": "{",
        "X-Claude-Code-Session-Id": "é",
    }
    async with world(model_dir) as w:
        client = await w.client(wire, stream=stream, headers=headers)
        for _ in range(2):
            client.history += wire.user("go")
            reply = await client.send(client.body() | UNKNOWN[wire.name] | {"model": "no-such-model-99", "new": [{}]})
            client.history += wire.echo(reply.kept)
            assert (reply.status, reply.text) == (200, "ls")
            assert last_of(w)["temperature"] == 1.0
        report = await w.finish()
        check_exact(report, w.engines)
        assert (len(report.lineages), report.masked) == (1, {})


async def test_the_model_list_has_a_single_model_in_each_dialect(model_dir: Path) -> None:
    async with world(model_dir) as w:
        base = await w.open()
        async with w.http.get(f"{base}/v1/models") as response:
            assert (await response.json())["object"] == "list"
        async with w.http.get(f"{base}/v1/models", headers={"anthropic-version": "2023-06-01"}) as response:
            assert (await response.json())["has_more"] is False
        async with w.http.get(f"{w.url}/v1/models") as response:
            assert (response.status, "unknown or closed" in await response.text()) == (400, True)


@EVERY
async def test_an_engine_s_own_limit_is_the_wire_s_context_error(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, Lines(Fault.TOO_LONG)) as w:
        client = await w.client(wire)
        refused = await client.say("a prompt that the session would allow")
        assert refused.status == 400
        assert re.search("prompt is too long: .* 8 maximum|context length is 8 tokens", refused.error["message"])
        report = await w.finish()
        assert (report.exhausted, report.failures, len(w.engines[0].requests)) == ("context", (), 1)


async def test_each_model_name_is_described_in_each_dialect(model_dir: Path) -> None:
    async with world(model_dir) as w:
        base = await w.open()
        for name in ("gpt-5", "org/model:free"):
            async with w.http.get(f"{base}/v1/models/{name}") as response:
                document = await response.json()
            assert (document["id"], document["object"]) == (name, "model")
            async with w.http.get(f"{base}/v1/models/{name}", headers={"anthropic-version": "1"}) as response:
                document = await response.json()
            assert (document["id"], document["type"]) == (name, "model")


async def test_input_tokens_are_those_of_the_turn(model_dir: Path) -> None:
    async with world(model_dir) as w:
        client = await w.client(RESPONSES, tools=("bash",))
        body = client.body(input=client.wire.user("how many?"))
        async with w.http.post(f"{client.base_url}/v1/responses/input_tokens", json=body) as response:
            counted = await response.json()
        assert (await client.say("how many?")).status == 200
        assert counted == {
            "object": "response.input_tokens",
            "input_tokens": len(w.engines[0].requests[0]["input_ids"]),
        }
        assert (await w.finish()).turns == 1


@EVERY
async def test_turns_with_inexact_sampling_are_masked(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire, spec={"sampling": Sampling(top_p=0.9)})
        await client.say("go")
        assert last_of(w)["top_p"] == 0.9
        report = await w.finish()
        assert (report.trained_tokens, report.masked) == (0, {"sampling": report.sampled_tokens})


async def test_reasoning_opened_by_the_prompt_is_sent_as_reasoning(tmp_path: Path) -> None:
    from support.chat_templates import QWEN3_THINKING

    folder = QWEN3_THINKING.write(tmp_path)
    for wire in WIRES:
        async with world(folder, Lines("so and so\n</think>\n\nDone.", "so\n</think>\n\nMore.")) as w:
            client = await w.client(wire)
            reply = await client.say("go")
            assert reply.text == "Done."
            assert "so and so" in json.dumps(reply.kept)
            assert (await client.say("on")).text == "More."
            report = await w.finish()
            check_exact(report, w.engines)
            assert (report.masked, len(report.lineages)) == ({}, 1)


async def test_one_session_serves_all_dialects_at_once(model_dir: Path) -> None:
    """Agents of one session may use different APIs."""
    async with world(model_dir, Lines("ls")) as w:
        first = await w.client(ANTHROPIC)
        clients = [first, *(dataclasses.replace(first, wire=wire, history=[]) for wire in (CHAT, RESPONSES))]
        for client, text in zip(clients, ("a", "b", "c"), strict=True):
            await client.say(text)
            await client.say("on")
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, len(report.lineages), report.masked) == (6, 3, {})
