"""The forward pass agrees with transformers, and incremental decoding of a ragged batch with the forward pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.qwen import KeyValueCache, Qwen, QwenWeights, read_weights
from headrace.policies.models.qwen_config import QwenConfig, storage_place
from support.tiny_model import QWEN2

LENGTHS = (5, 17, 1, 40)


def load(directory: Path) -> Qwen:
    config = QwenConfig.read(directory / "config.json")
    return Qwen(config, read_weights(config, directory), capacity=128)


def random_prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize(("keys", "files"), [({}, 1), (QWEN2, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_model_agrees_with_transformers(
    tmp_path: Path, write_model, tied: bool, keys: dict[str, object], files: int
) -> None:
    from transformers import AutoModelForCausalLM

    directory = write_model(tmp_path / "model", seed=1, tied=tied, files=files, **keys)
    model = load(directory)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt in random_prompts(model.config.vocab_size):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits.log_softmax(-1)
        got = model.logits([prompt]).log_softmax(-1)
        assert expected.std() > 0.5
        assert (got - expected).abs().max() <= 1e-3


@pytest.mark.parametrize("keys", [{}, QWEN2])
def test_ragged_decode_equals_full_forward(tmp_path: Path, write_model, keys: dict[str, object]) -> None:
    model = load(write_model(tmp_path / "model", **keys))
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


def test_cache_rows_can_be_moved(tiny_model_dir: Path) -> None:
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
def test_bad_models_are_named_in_the_error(tmp_path: Path, write_model, change: dict[str, object], named: str) -> None:
    directory = write_model(tmp_path / "model")
    keys = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(keys | change))
    with pytest.raises(ModelInvalid, match=named):
        load(directory)


def test_truncated_weights_are_named_in_the_error(tmp_path: Path, write_model) -> None:
    directory = write_model(tmp_path / "model")
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelInvalid, match=r"model\.safetensors"):
        load(directory)


@pytest.mark.parametrize("keys", [{}, QWEN2])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_sorted_in_storage_order(
    tmp_path: Path, write_model, tied: bool, keys: dict[str, object]
) -> None:
    config = load(write_model(tmp_path / "model", tied=tied, **keys)).config
    weights = QwenWeights.allocate(config)
    names = list(config.shapes())
    shuffled = ["z.weight", "model.layers.0.bias", *names[::-1]]
    assert sorted(shuffled, key=storage_place)[: len(names)] == names
    for first in range(len(names)):
        for last in range(first + 1, len(names) + 1):
            place = weights.place(names[first:last])
            assert place is not None
            assert place.numel() == sum(weights.slots[name].numel() for name in names[first:last])
    assert weights.place(names[:3]).data_ptr() == weights.slots[names[0]].data_ptr()
    assert weights.place([names[0], names[2]]) is None
    assert weights.place([names[1], names[0]]) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_are_refused(tiny_model_dir: Path, bad: float) -> None:
    weights = QwenWeights.allocate(load(tiny_model_dir).config)
    norm = torch.ones(96)
    weights.load("model.norm.weight", torch.full((96,), 3e38))
    norm[95] = bad
    with pytest.raises(ModelInvalid, match=r"model\.norm\.weight contains NaN or infinity"):
        weights.load("model.norm.weight", norm)
    with pytest.raises(ModelInvalid, match="parameter other has shape"):
        weights.load("other", norm)


def test_parameters_not_loaded_are_copied_from_the_other_set(tiny_model_dir: Path) -> None:
    model = load(tiny_model_dir)
    changed = QwenWeights.allocate(model.config)
    name = "model.layers.1.self_attn.q_norm.weight"
    with pytest.raises(ModelInvalid, match="is missing"):
        changed.complete(None)
    changed.load(name, 2 * model.weights.slots[name].to(torch.bfloat16))
    changed.complete(model.weights)
    assert changed.missing() == []
    assert changed.dtypes[name] == torch.bfloat16
    assert changed.memory.data_ptr() != model.weights.memory.data_ptr()
    differing = [key for key in changed.slots if not torch.equal(changed.slots[key], model.weights.slots[key])]
    assert differing == [name]
    assert torch.equal(changed.layers[1].qk_norm[:3], changed.slots[name].expand(3, 32))
    assert torch.equal(changed.layers[1].qk_norm[3:], model.weights.layers[1].qk_norm[3:])
