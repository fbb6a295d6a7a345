"""Forced calls and JSON answers on three wires: what engines are asked for, with scripted engines, and what comes of it
with a real one that samples from random weights, so that only the grammar can make its answers fit."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.policies.engine import EngineId
from headrace.policies.processes.server_process import EngineProcess, EngineProcessConfig
from headrace.serve.gateway.capture.session import Budgets, Sampling
from headrace.serve.gateway.http.routing import EngineRoute, RoutingTable
from support.chat_templates import QWEN3_THINKING, QWEN25, Family
from support.gateway_rig import ANTHROPIC, CHAT, RESPONSES, WIRES, Client, Lines, Reply, Wire, World, call_text, world
from support.scripted_engine import Fault, check_exact
from support.tiny_model import KEYS, random_tensors
from support.wires import read_refusal

EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
EITHER = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ARGUMENTS = {
    "type": "object",
    "properties": {"command": {"enum": ["ls", "pwd"]}, "times": {"enum": [1, 12]}},
    "required": ["command", "times"],
    "additionalProperties": False,
}
ANSWER = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}, "grade": {"enum": ["good", "bad"]}},
    "required": ["done", "grade"],
    "additionalProperties": False,
}
BROKEN = {"type": "no type"}
CALLS = [{"command": command, "times": times} for command in ("ls", "pwd") for times in (1, 12)]


def tools(wire: Wire, *names: str) -> dict[str, Any]:
    """Tools whose arguments are few."""
    functions = [{"name": name, "description": "d", "parameters": ARGUMENTS} for name in names]
    if wire is CHAT:
        return {"tools": [{"type": "function", "function": function} for function in functions]}
    if wire is RESPONSES:
        return {"tools": [{"type": "function"} | function for function in functions]}
    return {"tools": [{"name": name, "input_schema": ARGUMENTS} for name in names]}


def named(wire: Wire, name: str) -> dict[str, Any]:
    if wire is CHAT:
        return {"tool_choice": {"type": "function", "function": {"name": name}}}
    return {"tool_choice": {"type": "function" if wire is RESPONSES else "tool", "name": name}}


def required(wire: Wire) -> dict[str, Any]:
    return {"tool_choice": {"type": "any"} if wire is ANTHROPIC else "required"}


def schema(wire: Wire, given: dict[str, Any]) -> dict[str, Any]:
    if wire is CHAT:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}
    if wire is RESPONSES:
        return {"text": {"format": {"type": "json_schema", "name": "x", "schema": given}}}
    return {"output_config": {"format": {"type": "json_schema", "schema": given}}}


FIELDS = {"chat": "response_format", "responses": "text.format", "anthropic": "output_config.format"}


def asked(w: World) -> dict[str, Any]:
    sampling: dict[str, Any] = w.engines[0].requests[-1]["sampling_params"]
    return sampling


def refusal(client: Client, reply: Reply) -> str:
    assert reply.status == 400, reply.raw
    return read_refusal(client.wire.name, json.loads(reply.raw))


async def tree_of(w: World) -> list[dict[str, Any]]:
    status, report = await w.post("/sessions/rollout-1/finish", {"tree": True})
    assert status == 200
    found: list[dict[str, Any]] = report["tree"]
    return found


# What the engine is asked for.


@EVERY
async def test_forced_calls_reach_the_engine_in_the_parsers_form(model_dir: Path, wire: Wire) -> None:
    said = call_text("bash", command="ls")
    async with world(model_dir, Lines(said, said, "free")) as w:
        client = await w.client(wire, tools=("bash", "edit"))
        first = await client.say("go", **named(wire, "bash"))
        assert [call[1] for call in first.calls] == ["bash"]
        tag = json.loads(asked(w)["structural_tag"])
        # Qwen3 may reason before the call.
        optional, calls = tag["format"]["elements"]
        assert (optional["type"], optional["content"]["begin"]) == ("optional", "<think>")
        [one] = calls["tags"]
        assert (one["begin"], one["end"]) == ('<tool_call>\n{"name": "bash", "arguments": ', "}\n</tool_call>")
        assert one["content"]["json_schema"]["properties"] == {"command": {"type": "string"}}
        assert (calls["at_least_one"], calls["stop_after_first"]) == (True, True)
        await client.give((first.calls[0][0], "out"), **required(wire))
        calls = json.loads(asked(w)["structural_tag"])["format"]["elements"][1]
        assert (len(calls["tags"]), calls["stop_after_first"]) == (2, False)
        await client.say("on")
        assert not {"structural_tag", "json_schema"} & asked(w).keys()
        report = await w.finish()
        check_exact(report, w.engines)
        [one, other, free] = w.engines[0].outputs()
        assert report.masked == {"sampling": len(one) + len(other)}
        assert (report.trained_tokens, report.unhonoured, len(report.lineages)) == (len(free), {}, 1)


@EVERY
async def test_json_answers_reach_the_engine_as_a_schema(tmp_path: Path, wire: Wire) -> None:
    async with world(QWEN25.write(tmp_path / "m"), Lines('{"done": true, "grade": "bad"}')) as w:
        client = await w.client(wire)
        assert json.loads((await client.say("go", **schema(wire, ANSWER))).text) == {"done": True, "grade": "bad"}
        assert json.loads(asked(w)["json_schema"]) == ANSWER
        assert "structural_tag" not in asked(w)
        # With tools, the policy may call one instead.
        await client.say("go on", **schema(wire, ANSWER), **tools(wire, "bash"))
        [calls, answer] = json.loads(asked(w)["structural_tag"])["format"]["elements"]
        assert (calls["type"], answer["type"], answer["json_schema"]) == ("tags_with_separator", "json_schema", ANSWER)
        [turn, other] = await tree_of(w)
        assert (turn["constraint"], turn["honoured"], turn["masked"]) == ("json_schema", True, "side")
        assert (other["constraint"], other["honoured"], other["masked"]) == ("json_schema", True, "sampling")


async def test_a_json_object_is_a_schema_too(tmp_path: Path) -> None:
    async with world(QWEN25.write(tmp_path / "m"), Lines("{}")) as w:
        client = await w.client(CHAT)
        await client.say("go", response_format={"type": "json_object"})
        assert json.loads(asked(w)["json_schema"]) == {"type": "object"}


async def test_an_open_thought_is_closed_before_the_call(tmp_path: Path) -> None:
    said = "So be it.\n</think>\n\n" + call_text("bash", command="ls")
    async with world(QWEN3_THINKING.write(tmp_path / "m"), Lines(said)) as w:
        client = await w.client(CHAT, tools=("bash",))
        reply = await client.say("go", tool_choice="required")
        assert (reply.calls[0][1], reply.kept["reasoning_content"]) == ("bash", "So be it.")
        thought, calls = json.loads(asked(w)["structural_tag"])["format"]["elements"]
        assert thought == {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>\n\n"}
        assert calls["type"] == "tags_with_separator"


async def test_a_turn_that_its_engine_aborts_starts_over(model_dir: Path) -> None:
    said = call_text("bash", command="ls")
    async with world(model_dir, Lines("part", Fault.ABORT, Fault.ABORT, said)) as w:
        client = await w.client(CHAT, tools=("bash",))
        await client.say("go")
        reply = await client.say("call", tool_choice="required")
        assert [call[1] for call in reply.calls] == ["bash"]
        first, *again = w.engines[0].requests[1:]
        assert [one["input_ids"] for one in again] == [first["input_ids"]] * 2, "not from within the grammar"
        assert len({one["rid"] for one in again}) == 2
        assert len({one["sampling_params"]["max_new_tokens"] for one in (first, *again)}) == 1
        report = await w.finish()
        assert (report.turns, report.failures) == (2, ())
        assert report.masked == {"sampling": len(w.engines[0].outputs()[-1])}


@EITHER
async def test_legacy_functions_are_served_in_their_own_form(model_dir: Path, stream: bool) -> None:
    said = call_text("bash", command="ls  é")
    functions = {"functions": [{"name": "bash", "parameters": ARGUMENTS}]}
    async with world(model_dir, Lines("I look.\n" + said, said, "done")) as w:
        client = await w.client(CHAT, stream=stream)
        ends = []
        for fields in ({}, {"function_call": {"name": "bash"}}, {}):
            history = client.history or CHAT.user("go")
            body = client.body(**functions, **fields) | {"messages": [{"role": "system", "content": "s"}, *history]}
            reply = await client.send(body)
            ends.append((reply.end, reply.kept.get("function_call"), reply.calls))
            client.history = [*history, reply.kept, {"role": "function", "name": "bash", "content": "out"}]
        served = {"name": "bash", "arguments": '{"command": "ls  \\u00e9"}'}
        assert ends == [("function_call", served, ()), ("function_call", served, ()), ("stop", None, ())]
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.rerendered, len(report.lineages), report.failures) == (3, 0, 1, ())
        assert report.masked == {"sampling": len(w.engines[0].outputs()[1])}
        assert report.drift == {"calls": 2}, "its form has no ids"


async def test_a_legacy_answer_has_the_first_of_several_calls(model_dir: Path) -> None:
    both = call_text("bash", command="ls") + "\n" + call_text("bash", command="pwd")
    async with world(model_dir, Lines(both, "done")) as w:
        client = await w.client(CHAT)
        functions = {"functions": [{"name": "bash", "parameters": ARGUMENTS}]}
        reply = await client.say("go", **functions)
        assert json.loads(reply.kept["function_call"]["arguments"]) == {"command": "ls"}
        await client.ask({"role": "function", "name": "bash", "content": "out"}, **functions)
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.masked, len(report.lineages), report.rerendered) == ({}, 2, 1)


# Bad input, and engines without a grammar.


@EVERY
@EITHER
async def test_a_schema_that_the_grammar_refuses_is_the_agents_error(model_dir: Path, wire: Wire, stream: bool) -> None:
    async with world(model_dir, Lines(Fault.GRAMMAR_REFUSED)) as w:
        client = await w.client(wire, stream=stream, tools=("bash",))
        refused = await client.send(client.body(**schema(wire, ANSWER)) | _history(wire))
        if wire is RESPONSES or not stream:
            assert f"{FIELDS[wire.name]} cannot be honoured: schema of" in refusal(client, refused)
        assert (await client.say("go")).text == "free"
        report = await w.finish()
        check_exact(report, w.engines)
        assert (report.turns, report.masked, report.failures, report.unhonoured) == (1, {}, (), {})


def _history(wire: Wire) -> dict[str, Any]:
    return {"input" if wire is RESPONSES else "messages": wire.user("go")}


@EVERY
async def test_a_choice_of_no_given_tool_is_refused_before_an_engine_is_asked(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir) as w:
        client = await w.client(wire, tools=("bash",))
        for choice, sentence in ((named(wire, "rm"), "no tool 'rm'"), (required(wire) | {"tools": []}, "no tools")):
            assert sentence in refusal(client, await client.send(client.body(**choice) | _history(wire)))
        assert not w.engines[0].requests
        report = await w.finish()
        assert (report.turns, report.sampled_tokens, report.failures) == (0, 0, ())


@EVERY
@pytest.mark.parametrize("parser", ["hermes", "none"])
async def test_a_constraint_without_a_grammar_is_refused_or_served_freely(
    model_dir: Path, wire: Wire, parser: str
) -> None:
    fault = Fault.NO_GRAMMAR if parser == "hermes" else "free"
    async with world(model_dir, Lines(fault), parser=parser) as w:
        strict = await w.client(wire, "strict", tools=("bash",))
        sentence = refusal(strict, await strict.send(strict.body(**required(wire)) | _history(wire)))
        assert sentence.startswith("tool_choice cannot be honoured: the model's engine has no grammar for it.")
        nothing = await w.finish("strict")
        assert (nothing.turns, nothing.sampled_tokens, nothing.failures) == (0, 0, ())
        client = await w.client(wire, tools=("bash",), spec={"serve_unhonoured": True})
        assert (await client.say("go", **required(wire))).text == "free"
        assert (await client.say("go", **schema(wire, ANSWER))).text == "free"
        assert (await client.say("go")).text == "free"
        report = await w.finish()
        check_exact(report, w.engines)
        assert report.unhonoured == {"call": 1, "json_schema": 1}
        assert (report.turns, report.masked) == (3, {}), "they are samples of the policy"


async def test_the_admin_routes_take_the_option_and_give_the_count(model_dir: Path) -> None:
    async with world(model_dir, Lines(Fault.NO_GRAMMAR)) as w:
        status, opened = await w.post("/sessions", {"session_id": "one", "serve_unhonoured": True})
        assert status == 200
        client = Client(w.http, opened["base_url"], CHAT)
        await client.say("go", response_format={"type": "json_object"})
        status, report = await w.post("/sessions/one/finish", {"tree": True})
        assert (status, report["unhonoured"], report["masked"]["sampling"]) == (200, {"json_object": 1}, 0)
        [turn] = report["tree"]
        assert (turn["constraint"], turn["honoured"], turn["masked"]) == ("json_object", False, None)


async def test_a_restarted_gateway_knows_what_was_constrained(model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines(call_text("bash", command="ls")), session_log_dir=tmp_path) as w:
        client = await w.client(CHAT, tools=("bash",), spec={"serve_unhonoured": True})
        await client.say("go", tool_choice="required")
        output = w.engines[0].outputs()[0]
    async with world(model_dir, Lines(Fault.NO_GRAMMAR), session_log_dir=tmp_path) as w:
        client.http, client.base_url = w.http, w.url + "/s/" + client.base_url.rpartition("/")[2]
        assert (await client.say("on", tool_choice="required")).text == "free"
        report = await w.finish()
        assert (report.masked, report.unhonoured, report.turns) == ({"sampling": len(output)}, {"call": 1}, 2)


# A real engine.


def write_model(folder: Path, family: Family = QWEN25) -> Path:
    """Random weights for a family's tokenizer and template."""
    from safetensors.torch import save_file

    family.write(folder)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    keys = {**KEYS, "vocab_size": size}
    (folder / "config.json").write_text(json.dumps(keys))
    save_file(random_tensors(keys, 3), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def weights_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("constrained") / "model")


def letters() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@asynccontextmanager
async def real(model_dir: Path, folder: Path, **config: Any) -> AsyncIterator[World]:
    process = EngineProcess(
        EngineProcessConfig(model=model_dir, directory=folder, weight_version="1.4", max_context=2048)
    )
    async with process as engine, world(model_dir, **config) as w:
        route = EngineRoute(engine_id=EngineId("cpu"), url=engine.url)
        assert await w.gateway.set_engines(RoutingTable(version=2, engines=(route,)))
        yield w


LONG = {"budgets": Budgets(max_context_tokens=2000, max_tokens_per_turn=200)}
SHORT = {"budgets": Budgets(max_context_tokens=1000, max_tokens_per_turn=200)}


@EITHER
async def test_a_random_policy_makes_the_demanded_calls(weights_dir: Path, tmp_path: Path, stream: bool) -> None:
    async with real(weights_dir, tmp_path) as w:
        for wire in WIRES:
            client = await w.client(wire, wire.name, stream=stream, spec=SHORT)
            reply = await client.say("go", **tools(wire, "bash", "look"), **named(wire, "look"))
            [(call_id, name, arguments)] = reply.calls
            assert (name, reply.text, reply.end) == ("look", "", "completed" if wire is RESPONSES else reply.end)
            assert arguments in CALLS
            reply = await client.give((call_id, "done"), **tools(wire, "bash", "look"), **required(wire))
            assert len(reply.calls) >= 1 or reply.end in ("length", "max_tokens", "incomplete")
            for _, name, arguments in reply.calls:
                assert name in ("bash", "look")
                assert arguments in CALLS
            report = await w.finish(wire.name)
            assert (report.trained_tokens, report.turns, report.rerendered) == (0, 2, 0)
            assert report.masked == {"sampling": report.sampled_tokens}


@EVERY
async def test_a_random_policy_gives_the_demanded_json(weights_dir: Path, tmp_path: Path, wire: Wire) -> None:
    async with real(weights_dir, tmp_path) as w:
        client = await w.client(wire, spec=SHORT)
        seen = []
        for _ in range(6):
            answer = json.loads((await client.say("go", **schema(wire, ANSWER))).text)
            assert answer.keys() == {"done", "grade"}
            assert answer["done"] in (True, False)
            assert answer["grade"] in ("good", "bad")
            seen.append(str(answer))
        assert len(set(seen)) > 1
        assert (await w.finish()).turns == 6


async def test_calls_of_qwen3_coder_are_forced_in_its_own_markup(weights_dir: Path, tmp_path: Path) -> None:
    async with real(weights_dir, tmp_path, parser="qwen3_coder") as w:
        client = await w.client(CHAT, spec=SHORT)
        for name in ("bash", "look", "bash"):
            reply = await client.say("go", **tools(CHAT, "bash", "look"), **named(CHAT, name))
            [(_, called, arguments)] = reply.calls
            assert called == name
            assert arguments in CALLS
        report = await w.finish()
        assert (report.lost_calls, report.masked) == (0, {"sampling": report.sampled_tokens})


@EVERY
async def test_a_real_grammar_refuses_a_broken_schema(weights_dir: Path, tmp_path: Path, wire: Wire) -> None:
    async with real(weights_dir, tmp_path) as w:
        client = await w.client(wire, spec=SHORT)
        sentence = refusal(client, await client.send(client.body(**schema(wire, BROKEN)) | _history(wire)))
        assert sentence == f"{FIELDS[wire.name]} cannot be honoured: Invalid type: no type"
        report = await w.finish()
        assert (report.turns, report.sampled_tokens, report.failures) == (0, 0, ())


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_stored_logprobs_are_those_of_the_constrained_distribution(tmp_path: Path, temperature: float) -> None:
    """The allowed tokens are found here by spelling out every output that the demand allows, in letters: a tokenizer
    with longer tokens spells most texts in several ways, of which llguidance allows one where nothing else can come."""
    import torch

    from headrace.policies.models.qwen import Qwen, read_weights
    from headrace.policies.models.qwen_config import QwenConfig

    model_dir = write_model(tmp_path / "model", replace(QWEN25, tokenizer=letters))
    async with real(model_dir, tmp_path) as w:
        client = await w.client(CHAT, spec=LONG | {"sampling": Sampling(temperature=temperature)})
        await client.say("go", **tools(CHAT, "bash", "look"), **named(CHAT, "look"))
        status, report = await w.post("/sessions/rollout-1/finish", {})
    assert status == 200
    [row] = report["rows"]
    assert not any(row["loss_mask"])
    config = QwenConfig.read(model_dir / "config.json")
    model = Qwen(config, read_weights(config, model_dir), capacity=2048)
    ids, [[start, end, *_]] = row["tokens"], row["versions"]
    assert end == len(ids)
    rows = model.logits([ids])[0, start - 1 : end - 1] / temperature
    outputs = [
        f'<tool_call>\n{{"name": "look", "arguments": {json.dumps(call)}}}\n</tool_call><|im_end|>' for call in CALLS
    ]
    outputs += [output.replace("<|im_end|>", "<|endoftext|>") for output in outputs]
    spellings = spellings_of(model_dir)
    said, restricted = "", 0
    for index, token in enumerate(ids[start:end]):
        rests = [output.removeprefix(said) for output in outputs if output.startswith(said)]
        allowed = [number for number, text in spellings.items() if any(fits(text, rest) for rest in rests)]
        restricted += 1 < len(allowed) < len(spellings)
        expected = rows[index][allowed].log_softmax(-1)[allowed.index(token)]
        assert row["logprobs"][start + index] == pytest.approx(float(expected), abs=1e-3)
        said += spellings[token]
    assert said in outputs
    assert restricted == 3, "the command, the number and the stop token"
    free = torch.log_softmax(rows, -1)[torch.arange(end - start), ids[start:end]]
    assert np.abs(np.array(row["logprobs"][start:end]) - free.numpy()).max() > 1


MARKUP = ("<tool_call>", "</tool_call>", "<|im_end|>", "<|endoftext|>")


def spellings_of(model_dir: Path) -> dict[int, str]:
    """Text of each token that is whole characters."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    texts = {number: tokenizer.decode([number], skip_special_tokens=False) for number in tokenizer.get_vocab().values()}
    return {number: text for number, text in texts.items() if text and "\ufffd" not in text}


def fits(text: str, rest: str) -> bool:
    """Return whether a token's text begins the rest of an output. Markup is one token."""
    begun = next((mark for mark in MARKUP if rest.startswith(mark)), None)
    if begun is not None or text in MARKUP:
        return text == begun
    edge = min((rest.find(mark) for mark in MARKUP if mark in rest), default=len(rest))
    return rest[:edge].startswith(text)
