"""Whether a directory holds a model that engine and learner can load, told from its files without torch.

Invariant: only headers are read; a directory that passes here has every tensor of its config, in the shapes the
config says.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from headrace.policies.errors import ModelInvalid
from headrace.policies.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from pathlib import Path

FILES = ("config.json", "model.safetensors", "tokenizer.json")
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def check_model_files(directory: Path) -> None:
    """Raises ModelInvalid (TokenizerMismatch when the tokenizer does not fit) with file, reason and fix, on one
    line."""
    for name in FILES:
        path = directory / name
        if not path.is_file():
            raise ModelInvalid(f"model.path: {directory} has no {name}; name a Hugging Face model directory")
        if not os.access(path, os.R_OK):
            raise ModelInvalid(f"model.path: {path} cannot be read; check its permissions")
    config = read_config(directory / "config.json")
    ChatTokenizer(directory)
    check_shapes(directory / "model.safetensors", expected_shapes(config))


def read_config(path: Path) -> dict[str, Any]:
    """The model's config. Raises ModelInvalid when it is no JSON object or lacks a size."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelInvalid(f"{path}: not valid JSON: {error}") from error
    missing = [name for name in SIZES if not isinstance(config, dict) or not isinstance(config.get(name), int)]
    if missing:
        raise ModelInvalid(f"{path}: {missing[0]} is missing or no number; a Qwen3 config.json is needed")
    return dict(config)


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a Qwen3 model (transformers, models/qwen3/modeling_qwen3.py)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        shapes |= {
            stem + "input_layernorm.weight": (hidden,),
            stem + "post_attention_layernorm.weight": (hidden,),
            stem + "self_attn.q_proj.weight": (queries, hidden),
            stem + "self_attn.k_proj.weight": (keys, hidden),
            stem + "self_attn.v_proj.weight": (keys, hidden),
            stem + "self_attn.o_proj.weight": (hidden, queries),
            stem + "self_attn.q_norm.weight": (head,),
            stem + "self_attn.k_norm.weight": (head,),
            stem + "mlp.gate_proj.weight": (inner, hidden),
            stem + "mlp.up_proj.weight": (inner, hidden),
            stem + "mlp.down_proj.weight": (hidden, inner),
        }
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def check_shapes(path: Path, expected: dict[str, tuple[int, ...]]) -> None:
    """Compare a safetensors header with the expected names and shapes. Raises ModelInvalid."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelInvalid(f"{path}: not a readable safetensors file: {error}") from error
    for name, shape in expected.items():
        if found.get(name) != shape:
            raise ModelInvalid(f"{path}: {name} is {found.get(name, 'missing')}, config.json asks for {shape}")
