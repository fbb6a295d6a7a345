"""Outputs with a grammar, against real engine processes: forms, log-probabilities, pauses and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from headrace.policies.engine import (
    EngineId,
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    PauseMode,
    RequestId,
)
from headrace.policies.errors import GrammarRefused
from headrace.policies.sglang.client import SGLangConfig, SGLangEngine
from support import engine_kinds as kinds

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
END_ID = 257
DIGITS = {"type": "array", "items": {"enum": [0, 1]}, "minItems": 60, "maxItems": 60}


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["cpu", pytest.param("sglang", marks=pytest.mark.sglang)]
)
async def engine(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SGLangEngine]:
    folder, arguments = (
        tmp_path_factory.mktemp("engine"),
        ("--grammar-backend", "xgrammar", "--constrained-json-disable-any-whitespace"),
    )
    process = kinds.engine_process(request.param, tiny_model_dir, folder, max_running=4, arguments=arguments)
    async with process, aiohttp.ClientSession() as session:
        yield SGLangEngine(EngineId(request.param), process.url, session, SGLangConfig(vocab_size=258))


def ask(schema: object, name: str = "one", **changes: Any) -> GenerateRequest:
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(schema))
    request = GenerateRequest(request_id=RequestId(name), input_ids=(10, 20, 30), max_new_tokens=400, grammar=grammar)
    return replace(request, **changes)


async def test_logprobs_match_the_softmax_over_the_allowed_tokens(engine: SGLangEngine, tiny_model_dir: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    reference = Qwen3ForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    words = [f'"{one}{other}"' for one in "abc" for other in ("", "xyz", "xé")]
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    outputs = [[*tokenizer.encode(word).ids, END_ID] for word in words]
    asked = [
        ask({"enum": list(map(json.loads, words))}, f"r{index}", input_ids=(index, 5), temperature=temperature)
        for index, temperature in enumerate([1.0, 1.0, 0.6, 1.5] * 2)
    ]
    done = await asyncio.gather(*map(engine.generate, asked))
    assert len({completion.text for completion in done}) > 1
    for request, completion in zip(asked, done, strict=True):
        sampled = list(completion.output_ids)
        assert sampled in outputs
        assert completion.finish is FinishReason.STOP
        with torch.inference_mode():
            rows = reference(torch.tensor([[*request.input_ids, *sampled]])).logits[0, 1:-1] / request.temperature
        for index, token in enumerate(sampled):
            allowed = sorted({output[index] for output in outputs if output[:index] == sampled[:index]})
            expected = rows[index][allowed].log_softmax(-1)[allowed.index(token)]
            assert completion.logprobs[index] == pytest.approx(float(expected), abs=1e-3)


async def test_an_output_that_is_cut_has_the_beginning_of_the_form(engine: SGLangEngine) -> None:
    completion = await engine.generate(ask(DIGITS, max_new_tokens=7))
    assert completion.finish is FinishReason.LENGTH
    assert len(completion.output_ids) == 7
    assert set(completion.text) <= set("[], 01")
    assert completion.text.startswith("[")


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_a_pause_keeps_the_position_in_the_grammar(engine: SGLangEngine, mode: PauseMode) -> None:
    async with asyncio.TaskGroup() as group:
        # Long enough that one look at the engine falls into them, however late it comes.
        long = ask(DIGITS | {"minItems": 250, "maxItems": 250}, max_new_tokens=900)
        requests = [replace(long, request_id=RequestId(f"{mode}{index}")) for index in range(2)]
        tasks = [group.create_task(engine.generate(request)) for request in requests]
        async with asyncio.timeout(30):
            while (await engine.load()).used_tokens < 40:
                assert not any(task.done() for task in tasks), "they ended before anybody looked"
        await engine.pause(mode)
        assert not any(task.done() for task in tasks)
        await engine.resume()
    for task in tasks:
        completion = task.result()
        assert completion.retractions == (mode is PauseMode.RETRACT)
        assert len(json.loads(completion.text)) == 250
        assert completion.finish is FinishReason.STOP


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "nope"}'), "nope"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"pattern": "(", "type": "string"}'), "regex"),
        (Grammar(kind=GrammarKind.STRUCTURAL_TAG, text='{"format": {"type": "unheard_of"}}'), "unheard_of"),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"enum": ["longer than the model\'s context length"}'), "json"),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_refused_as_such(
    engine: SGLangEngine, grammar: Grammar, named: str
) -> None:
    with pytest.raises(GrammarRefused, match=named):
        await engine.generate(ask({}, grammar=grammar))
    assert (await engine.load()).requests == 0


async def test_samples_of_one_request_follow_the_grammar_each(engine: SGLangEngine) -> None:
    async with aiohttp.ClientSession() as session:
        params = {"json_schema": json.dumps(DIGITS), "n": 4, "max_new_tokens": 400}
        async with session.post(
            f"{engine.url}/generate", json={"input_ids": [1], "sampling_params": params}
        ) as response:
            replies = await response.json()
    values = [json.loads(reply["text"]) for reply in replies]
    assert all(len(value) == 60 for value in values)
    assert len(set(map(str, values))) == 4


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"json_schema": "{}", "structural_tag": "{}"}, "Only one of"),
        ({"json_schema": "{}", "ignore_eos": True}, "ignore_eos"),
        ({"ebnf": "root ::= []"}, "ebnf"),
    ],
)
async def test_parameters_that_contradict_a_grammar_are_refused(
    engine: SGLangEngine, params: dict[str, Any], named: str
) -> None:
    if engine.engine_id != "cpu":
        pytest.skip("SGLang ignores some, and fails with others")
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/generate", json={"input_ids": [1], "sampling_params": params}) as response,
    ):
        assert response.status == 400
        assert named in (await response.json())["error"]["message"]
