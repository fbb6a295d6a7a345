"""Log-probabilities of outputs with a grammar are those of the masked distribution, which this test computes itself: by
the model's logits, and by listing all outputs of the grammar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.policies.cpu_engine.grammars import Grammars
from headrace.policies.cpu_engine.requests import Prompt, SamplingParams
from headrace.policies.cpu_engine.runner import Runner
from headrace.policies.cpu_engine.scheduler import Generation, LengthReached, Scheduler, Stopped
from headrace.policies.engine import GrammarKind
from headrace.policies.models.qwen import read_weights
from headrace.policies.models.qwen_config import QwenConfig

if TYPE_CHECKING:
    from torch import Tensor

END_ID = 257
WORDS = st.lists(st.text("ab é", max_size=4), min_size=1, max_size=5, unique=True)


@pytest.fixture(scope="module")
def runner(tiny_model_dir: Path) -> Runner:
    config = QwenConfig.read(tiny_model_dir / "config.json")
    weights = read_weights(config, tiny_model_dir)
    return Runner(config, weights, version="1.0", max_running=4, context_tokens=256, seed=0)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))


def masked_logprobs(runner: Runner, item: Generation, outputs: list[list[int]]) -> Tensor:
    """Log-probabilities `(T,)` of a sequence that may only be one of these outputs."""
    prompt, sampled = list(item.prompt.input_ids), item.output_ids
    temperature = item.prompt.sampling.temperature or 1.0
    rows = runner.model.logits([prompt + sampled])[0, len(prompt) - 1 : -1] / temperature
    found = []
    for index, token in enumerate(sampled):
        begun = [output for output in outputs if output[:index] == sampled[:index]]
        allowed = sorted({output[index] for output in begun})
        assert token in allowed
        found.append(rows[index][allowed].log_softmax(-1)[allowed.index(token)])
    return torch.stack(found)


@pytest.mark.whole
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    choices=st.lists(WORDS, min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=6),
    most=st.integers(1, 12),
)
def test_logprobs_are_those_of_the_masked_distribution(
    runner: Runner, tokenizer: Tokenizer, choices: list[list[str]], temperature: float, prompt: list[int], most: int
) -> None:
    grammars = Grammars(tokenizer, vocab_size=258, eos_ids=frozenset({END_ID}))
    scheduler = Scheduler(max_running=4, max_prefill_tokens=4096, eos_ids=frozenset({END_ID}), tail_text=str)
    items, languages = [], []
    for index, words in enumerate(choices):
        state = grammars.compile(GrammarKind.JSON_SCHEMA, json.dumps({"enum": words}), ())
        sampling = SamplingParams(max_new_tokens=most, temperature=temperature)
        asked = Prompt(request_id=str(index), input_ids=(*prompt, index), sampling=sampling, return_logprob=True)
        items.append(Generation(prompt=asked, grammar=state.fork()))
        spelled = (json.dumps(word, ensure_ascii=False) for word in words)
        languages.append([[*tokenizer.encode(text).ids, END_ID] for text in spelled])
    free = Prompt(
        request_id="free", input_ids=tuple(prompt), sampling=SamplingParams(max_new_tokens=6), return_logprob=True
    )
    items.append(Generation(prompt=free))
    for item in items:
        scheduler.add(item)
    while scheduler.runnable:
        runner.step(scheduler)
    for item, outputs in zip(items, languages, strict=False):
        whole = item.output_ids in outputs
        assert item.finish == (
            Stopped(matched=END_ID) if whole and len(item.output_ids) < most else LengthReached(length=most)
        )
        assert torch.tensor(item.logprobs) == pytest.approx(masked_logprobs(runner, item, outputs), abs=1e-3)
    alone = items[-1]
    everything = runner.model.logits([prompt + alone.output_ids])[0, len(prompt) - 1 : -1].log_softmax(-1)
    expected = everything[torch.arange(len(alone.output_ids)), alone.output_ids]
    assert torch.tensor(alone.logprobs) == pytest.approx(expected, abs=1e-3), (
        "a request without a grammar is not masked"
    )
