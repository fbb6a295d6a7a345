"""Config of a dense Qwen3 or Qwen2.5 model, read from its config.json without torch.

Invariants:
- Everything that computes the model here (the embedded engine and the Megatron learner) takes its sizes from this
  class, and refuses any architecture that the class does not describe.
- `shapes` are the model's parameters, all of them and in the order in which the embedded engine stores them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.model_files import read_shapes
from headrace.policies.tokens.model_keys import language_keys, read_language_keys

ARCHITECTURES: Final[Mapping[str, str]] = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""Architectures by `model_type`. Qwen2.5 has that of Qwen2: biases of queries, keys and values, no norms of heads."""
TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
LAYER_PARAMETERS: Final = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.o_proj.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
"""Parameters of a layer in the order of `QwenConfig.shapes`, in which those of one matrix are adjacent. A model has the
biases or the norms of heads, not both."""


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

    family: Literal["qwen3", "qwen2"] = "qwen3"
    """Architecture, by its `model_type`."""

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised per head."""
        return self.family == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values have a bias."""
        return self.family == "qwen2"

    @classmethod
    def read(cls, path: Path) -> QwenConfig:
        """Parse a config.json. Raises ModelInvalid naming the file and the key."""
        return cls.from_keys(read_language_keys(path), source=str(path))

    @classmethod
    def from_keys(cls, raw: Mapping[str, Any], *, source: str) -> QwenConfig:
        """Parse the keys of a config.json in the old format (`rope_theta`) or the new one (`rope_parameters`). Raises
        ModelInvalid."""
        raw = language_keys(raw)
        family = _family(raw, source)
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        if (
            rope.get("rope_type", "default") != "default"
            or (family == "qwen3" and raw.get("attention_bias"))
            or raw.get("use_sliding_window")
        ):
            raise ModelInvalid(f"{source}: scaled positions, attention bias and sliding windows are not supported")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelInvalid(f"{source}: hidden_act is {raw['hidden_act']}, but only silu is supported")
        keys = {
            **{key: value for key, value in raw.items() if value is not None},
            "rope_theta": rope.get("rope_theta", raw.get("rope_theta", 10_000.0)),
            "family": family,
        }
        if family == "qwen2" and "head_dim" not in keys:
            width, heads = keys.get("hidden_size"), keys.get("num_attention_heads")
            keys["head_dim"] = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 1
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
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (wide, hidden),
            "mlp.up_proj.weight": (wide, hidden),
            "mlp.down_proj.weight": (hidden, wide),
        }
        if self.qkv_bias:
            of_layer |= {f"self_attn.{part}_proj.bias": (queries if part == "q" else keys,) for part in "qkv"}
        if self.qk_norm:
            of_layer |= {f"self_attn.{part}_norm.weight": (head,) for part in "qk"}
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, hidden)}
        for layer in range(self.num_hidden_layers):
            ordered = (name for name in LAYER_PARAMETERS if name in of_layer)
            shapes |= {f"model.layers.{layer}.{name}": of_layer[name] for name in ordered}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes[TIED_HEAD] = (self.vocab_size, hidden)
        return shapes


def _family(keys: Mapping[str, Any], source: str) -> str:
    """Return the supported architecture that the keys name, by its `model_type`. Raises ModelInvalid."""
    named = keys.get("architectures")
    if not isinstance(named, list) or not named:
        model_type = str(keys.get("model_type") or "qwen3")
        named = [ARCHITECTURES.get(model_type, model_type)]
    for family, architecture in ARCHITECTURES.items():
        if architecture in named:
            return family
    raise ModelInvalid(
        f"{source}: architectures is {named}, but the embedded engine and the Megatron learner compute "
        f"{' and '.join(ARCHITECTURES.values())} only; serve other models with engines.backend sglang"
    )


def storage_place(name: str) -> tuple[float, int]:
    """Return the sort key of a parameter in the order of `QwenConfig.shapes`; unknown names come last."""
    if name == EMBEDDING:
        return 0, 0
    known = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if known is not None and known[2] in LAYER_PARAMETERS:
        return 1 + int(known[1]), LAYER_PARAMETERS.index(known[2])
    return math.inf, {"model.norm.weight": 0, TIED_HEAD: 1}.get(name, 2)


def check_computable(model_dir: Path) -> None:
    """Raise ModelInvalid if the embedded engine and the Megatron learner cannot compute the model, because of its
    architecture, or because its parameters do not match config.json. Only headers are read."""
    found = read_shapes(model_dir)
    for name, shape in QwenConfig.read(model_dir / "config.json").shapes().items():
        if found.get(name) != shape:
            raise ModelInvalid(f"{model_dir}: {name} is {found.get(name, 'missing')}, but config.json requires {shape}")
