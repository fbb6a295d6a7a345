"""Model directories: several files with an index, nested keys, and which checks depend on the architecture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.policies.errors import ModelInvalid
from headrace.policies.learners.megatron_model import read_weights as read_trained
from headrace.policies.models.model_files import check_model_files, read_shapes, weight_files
from headrace.policies.models.qwen import read_weights as read_served
from headrace.policies.models.qwen_config import QwenConfig, check_computable
from headrace.policies.models.tiny import CHAT_TEMPLATE
from headrace.policies.tokens.model_keys import read_vocabulary_size
from support.tiny_model import EOS_TOKEN, QWEN2, random_tensors, write_tiny_model, write_weights

INDEX = "model.safetensors.index.json"


@pytest.fixture
def write_model() -> Callable[..., Path]:
    """The usual tiny model, with a chat template."""

    def write(directory: Path, **changes: Any) -> Path:
        write_tiny_model(directory, **changes)
        document = {"eos_token": EOS_TOKEN, "chat_template": CHAT_TEMPLATE}
        (directory / "tokenizer_config.json").write_text(json.dumps(document))
        return directory

    return write


def rewrite_keys(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    keys = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in keys.items() if value is not None}))


@pytest.mark.parametrize("keys", [{}, QWEN2])
def test_weights_in_several_files_equal_those_in_one(
    tmp_path: Path, write_model: Callable[..., Path], keys: dict[str, object]
) -> None:
    one = write_model(tmp_path / "one", **keys)
    several = write_model(tmp_path / "several", files=3, **keys)
    assert [path.name for path in weight_files(several)] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    check_model_files(several)
    check_computable(several)
    assert read_shapes(several) == read_shapes(one)
    config = QwenConfig.read(several / "config.json")
    assert torch.equal(read_served(config, several).memory, read_served(config, one).memory)
    trained, expected = read_trained(several, config), read_trained(one, config)
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("{", "not an index"),
        ("[]", "not an index"),
        ('{"weight_map": 3}', "not an index"),
        ('{"weight_map": {"a": []}}', "not an index"),
        ('{"weight_map": {}}', "empty"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors"),
        ('{"weight_map": {"a": "../one/model.safetensors"}}', "not a file of"),
    ],
)
def test_a_damaged_index_is_named_in_the_error(
    tmp_path: Path, write_model: Callable[..., Path], index: str, said: str
) -> None:
    write_model(tmp_path / "one")
    model = write_model(tmp_path / "several", files=2)
    (model / INDEX).write_text(index)
    with pytest.raises(ModelInvalid, match=said) as caught:
        check_model_files(model)
    assert INDEX in str(caught.value)


def test_a_directory_without_weights_is_named_in_the_error(tmp_path: Path, write_model: Callable[..., Path]) -> None:
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelInvalid, match=r"has no model\.safetensors and no model\.safetensors\.index\.json"):
        check_model_files(model)


def test_a_parameter_in_two_files_is_refused(tmp_path: Path, write_model: Callable[..., Path]) -> None:
    model = write_model(tmp_path / "model", files=2)
    first, second = weight_files(model)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelInvalid, match="is in another weight file"):
        check_model_files(model)


def test_keys_are_read_from_a_nested_text_config(tmp_path: Path, write_model: Callable[..., Path]) -> None:
    """As multimodal models have it; a null does not count."""
    model = write_model(tmp_path / "model")
    flat = json.loads((model / "config.json").read_text())
    nested = {**flat, "architectures": None}
    outer = {"architectures": flat["architectures"], "vocab_size": 7, "text_config": nested}
    (model / "config.json").write_text(json.dumps(outer))
    assert read_vocabulary_size(model) == flat["vocab_size"]
    assert QwenConfig.read(model / "config.json") == QwenConfig.from_keys(flat, source="flat")
    check_model_files(model)
    check_computable(model)


@pytest.mark.parametrize(("size", "said"), [(None, "vocab_size is missing"), ("many", "vocab_size must be a positive")])
def test_a_model_without_a_vocabulary_size_is_refused(
    tmp_path: Path, write_model: Callable[..., Path], size: object, said: str
) -> None:
    model = write_model(tmp_path / "model")
    rewrite_keys(model, vocab_size=size)
    with pytest.raises(ModelInvalid, match=said):
        check_model_files(model)


def test_only_the_computing_component_refuses_an_architecture(tmp_path: Path, write_model: Callable[..., Path]) -> None:
    """Engines and learners elsewhere may compute what we cannot."""
    model = write_model(tmp_path / "model")
    rewrite_keys(model, architectures=["GlmMoeDsaForCausalLM"], hidden_size=128)
    write_weights(model, {"model.anything.weight": torch.ones(3)})
    check_model_files(model)
    with pytest.raises(ModelInvalid, match="GlmMoeDsaForCausalLM"):
        check_computable(model)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"architectures": None, "model_type": "qwen2"}, "qwen2"),
        ({"architectures": None, "model_type": None}, "qwen3"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": None, "head_dim": None}, "qwen2"),
    ],
)
def test_the_family_follows_from_architecture_or_model_type(changes: dict[str, object], family: str) -> None:
    keys = {"vocab_size": 10, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    config = QwenConfig.from_keys(keys, source="keys")
    assert config.family == family
    assert config.head_dim == (128 if family == "qwen3" else 16)
    assert (config.qk_norm, config.qkv_bias) == (family == "qwen3", family == "qwen2")
    assert random_tensors(keys, 0).keys() == config.shapes().keys()
