"""The forward pass agrees with transformers, and incremental decoding of a ragged batch with the forward pass."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from headrace.policies.errors import ModelInvalid
from headrace.policies.qwen3 import KeyValueCache, Qwen3, read_weights
from headrace.policies.qwen3_config import Qwen3Config

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = (5, 17, 1, 40)


def load(directory: Path) -> Qwen3:
    config = Qwen3Config.read(directory / "config.json")
    return Qwen3(config, read_weights(config, directory / "model.safetensors"), capacity=128)


def random_prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize("tied", [True, False])
def test_agrees_with_transformers(tmp_path: Path, write_model, tied: bool) -> None:
    from transformers import Qwen3ForCausalLM

    directory = write_model(tmp_path / "model", seed=1, tied=tied)
    model = load(directory)
    reference = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt in random_prompts(model.config.vocab_size):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits.log_softmax(-1)
        got = model.logits([prompt]).log_softmax(-1)
        assert expected.std() > 0.5
        assert (got - expected).abs().max() <= 1e-3


def test_ragged_decode_equals_full_forward(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir)
    prompts = random_prompts(model.config.vocab_size)
    cache = KeyValueCache(model.config, rows=8, capacity=128)
    logits = torch.cat([model.prefill(prompts[:1], 0, cache), model.prefill(prompts[1:], 1, cache)])
    sequences = [list(prompt) for prompt in prompts]
    for _ in range(12):
        for row, sequence in enumerate(sequences):
            full = model.logits([sequence])[0, -1]
            assert (logits[row].log_softmax(-1) - full.log_softmax(-1)).abs().max() <= 1e-4
            sequence.append(int(logits[row].argmax()))
        lengths = [len(sequence) - 1 for sequence in sequences]
        logits = model.decode(torch.tensor([sequence[-1] for sequence in sequences]), lengths, cache)


def test_rows_move(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir)
    prompts = random_prompts(model.config.vocab_size)
    cache = KeyValueCache(model.config, rows=8, capacity=128)
    model.prefill(prompts, 0, cache)
    cache.move(3, 0, len(prompts[3]))
    logits = model.decode(torch.tensor([7]), [len(prompts[3])], cache)
    full = model.logits([[*prompts[3], 7]])[0, -1]
    assert (logits[0] - full).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "positions"),
        ({"hidden_size": 64}, "embed_tokens"),
    ],
)
def test_bad_models_are_named(tmp_path: Path, write_model, change: dict[str, object], named: str) -> None:
    directory = write_model(tmp_path / "model")
    keys = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(keys | change))
    with pytest.raises(ModelInvalid, match=named):
        load(directory)


def test_truncated_weights_are_named(tmp_path: Path, write_model) -> None:
    directory = write_model(tmp_path / "model")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        load(directory)
