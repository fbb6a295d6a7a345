"""Config of a dense Qwen3 model, read from its config.json without torch.

Invariants:
- Only the header of the weights is read; a directory that passes the check has every tensor that its config requires,
  in the right shape.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.policies.errors import ModelInvalid
from headrace.policies.tokens.tokenizer import ChatTokenizer

LAYER_PARAMETERS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
"""Parameters of a layer in the order of `QwenConfig.shapes`, in which those of one matrix are adjacent."""


class QwenConfig(BaseModel):
    """Keys of a Hugging Face config.json that define a dense Qwen3 model; other keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vocab_size: int = Field(gt=0)
    """Number of rows of the embedding."""
    hidden_size: int = Field(gt=0)
    """Width of the residual stream."""
    intermediate_size: int = Field(gt=0)
    """Width of the SwiGLU layer."""
    num_hidden_layers: int = Field(gt=0)
    """Number of decoder layers."""
    num_attention_heads: int = Field(gt=0)
    """Number H of query heads."""
    num_key_value_heads: int = Field(gt=0)
    """Number G of key-value heads; H must be a multiple of it."""
    head_dim: int = Field(default=128, gt=0)
    """Dimension of one head."""
    rms_norm_eps: float = 1e-6
    """Epsilon added to the mean square before the root."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    max_position_embeddings: int = Field(default=32_768, gt=0)
    """Maximum sequence length for which positions are defined."""
    tie_word_embeddings: bool = False
    """Use the embedding as the output head."""

    @classmethod
    def read(cls, path: Path) -> QwenConfig:
        """Parse a config.json. Raises ModelInvalid naming the file and the key."""
        try:
            raw = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelInvalid(f"{path}: unreadable or not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ModelInvalid(f"{path}: must contain one JSON object")
        return cls.from_keys(raw, source=str(path))

    @classmethod
    def from_keys(cls, raw: Mapping[str, Any], *, source: str) -> QwenConfig:
        """Parse the keys of a config.json in the old format (`rope_theta`) or the new one (`rope_parameters`). Raises
        ModelInvalid."""
        if "Qwen3ForCausalLM" not in raw.get("architectures", ["Qwen3ForCausalLM"]):
            raise ModelInvalid(
                f"{source}: architectures is {raw['architectures']}, but this engine runs only Qwen3ForCausalLM"
            )
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default" or raw.get("attention_bias") or raw.get("use_sliding_window"):
            raise ModelInvalid(f"{source}: scaled positions, attention bias and sliding windows are not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelInvalid(f"{source}: hidden_act is {raw['hidden_act']}, but only silu is supported")
        keys = {**raw, "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10_000.0))}
        try:
            config = cls.model_validate(keys)
        except ValidationError as error:
            first = error.errors()[0]
            reason = " is missing" if first["type"] == "missing" else f": {first['msg']}"
            raise ModelInvalid(f"{source}: {'.'.join(map(str, first['loc']))}{reason}") from error
        if config.num_attention_heads % config.num_key_value_heads:
            raise ModelInvalid(f"{source}: num_attention_heads must be a multiple of num_key_value_heads")
        return config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the Hugging Face parameter names and their shapes, in the storage order of the embedded engine."""
        hidden, wide, head = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * head, self.num_key_value_heads * head
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (hidden,),
                prefix + "self_attn.q_proj.weight": (queries, hidden),
                prefix + "self_attn.k_proj.weight": (keys, hidden),
                prefix + "self_attn.v_proj.weight": (keys, hidden),
                prefix + "self_attn.o_proj.weight": (hidden, queries),
                prefix + "self_attn.q_norm.weight": (head,),
                prefix + "self_attn.k_norm.weight": (head,),
                prefix + "post_attention_layernorm.weight": (hidden,),
                prefix + "mlp.gate_proj.weight": (wide, hidden),
                prefix + "mlp.up_proj.weight": (wide, hidden),
                prefix + "mlp.down_proj.weight": (hidden, wide),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


def storage_place(name: str) -> tuple[float, int]:
    """Return the sort key of a parameter in the order of `QwenConfig.shapes`; unknown names come last."""
    if name == "model.embed_tokens.weight":
        return 0, 0
    known = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
    if known is not None and known[2] in LAYER_PARAMETERS:
        return 1 + int(known[1]), LAYER_PARAMETERS.index(known[2])
    return math.inf, {"model.norm.weight": 0, "lm_head.weight": 1}.get(name, 2)


FILES = ("config.json", "model.safetensors", "tokenizer.json")


def check_model_files(directory: Path) -> None:
    """Raise ModelInvalid (TokenizerMismatch if the tokenizer does not match) if the directory cannot be loaded. The
    message gives the file, the reason and the fix on one line."""
    for name in FILES:
        path = directory / name
        if not path.is_file():
            raise ModelInvalid(f"model.path: {directory} has no {name}; set it to a Hugging Face model directory")
        if not os.access(path, os.R_OK):
            raise ModelInvalid(f"model.path: {path} cannot be read; check its permissions")
    config = QwenConfig.read(directory / "config.json")
    ChatTokenizer(directory)
    check_shapes(directory / "model.safetensors", config.shapes())


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
            raise ModelInvalid(f"{path}: {name} is {found.get(name, 'missing')}, but config.json requires {shape}")
