"""Converts the weights of a Qwen3 or Qwen2.5 model between the names and layouts of Hugging Face and megatron-core.

Invariants:
- The conversion only renames, reorders and concatenates, so a round trip is bit-exact.
- It is one to one: a missing name, an unknown one or a wrong shape is refused, never ignored.

Layouts (megatron-core `SelfAttention` and `MLP`): `linear_qkv` contains, for each group, its query heads, its key head
and its value head, in its weight and in its bias; `linear_fc1` contains the rows of the gate, then those of the up
projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.policies.errors import ModelInvalid

if TYPE_CHECKING:
    from headrace.policies.models.qwen_config import QwenConfig

Weights = dict[str, torch.Tensor]

_LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_HEAD_NORM_NAMES = {
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}


def to_megatron(weights: Weights, config: QwenConfig) -> Weights:
    """Convert from Hugging Face to megatron-core. Raises ModelInvalid if names or shapes do not match `config`."""
    wanted, found = config.shapes(), {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise ModelInvalid(
                f"the model's weights: {name} has shape {found.get(name)}, but config.json requires {wanted.get(name)}"
            )
    result = {megatron: weights[name] for megatron, name in _top_names(config).items()}
    for layer in range(config.num_hidden_layers):
        result |= _layer_to_megatron(weights, layer, config)
    return result


def to_hugging_face(weights: Weights, config: QwenConfig) -> Weights:
    """Convert from megatron-core to Hugging Face, the inverse of `to_megatron`, as contiguous copies."""
    result = {name: weights[megatron].clone() for megatron, name in _top_names(config).items()}
    for layer in range(config.num_hidden_layers):
        result |= _layer_to_hugging_face(weights, layer, config)
    return result


def _top_names(config: QwenConfig) -> dict[str, str]:
    names = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    return names if config.tie_word_embeddings else names | {"output_layer.weight": "lm_head.weight"}


def _layer_names(config: QwenConfig) -> dict[str, str]:
    return _LAYER_NAMES | _HEAD_NORM_NAMES if config.qk_norm else _LAYER_NAMES


def _qkv_kinds(config: QwenConfig) -> tuple[str, ...]:
    return ("weight", "bias") if config.qkv_bias else ("weight",)


def _layer_to_megatron(weights: Weights, layer: int, config: QwenConfig) -> Weights:
    source, target = f"model.layers.{layer}.", f"decoder.layers.{layer}."
    result = {target + megatron: weights[source + name] for megatron, name in _layer_names(config).items()}
    for kind in _qkv_kinds(config):
        parts = [weights[f"{source}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        columns = parts[0].shape[1:]
        per_group = [part.reshape(config.num_key_value_heads, -1, config.head_dim, *columns) for part in parts]
        result[f"{target}self_attention.linear_qkv.{kind}"] = torch.cat(per_group, dim=1).reshape(-1, *columns)
    gate_up = torch.cat([weights[f"{source}mlp.gate_proj.weight"], weights[f"{source}mlp.up_proj.weight"]])
    return result | {target + "mlp.linear_fc1.weight": gate_up}


def _layer_to_hugging_face(weights: Weights, layer: int, config: QwenConfig) -> Weights:
    source, target = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    result = {target + name: weights[source + megatron].clone() for megatron, name in _layer_names(config).items()}
    groups = config.num_key_value_heads
    for kind in _qkv_kinds(config):
        fused = weights[f"{source}self_attention.linear_qkv.{kind}"]
        per_group = fused.reshape(groups, -1, config.head_dim, *fused.shape[1:])
        parts = torch.split(per_group, [config.num_attention_heads // groups, 1, 1], dim=1)
        for name, part in zip("qkv", parts, strict=True):
            result[f"{target}self_attn.{name}_proj.{kind}"] = part.reshape(-1, *fused.shape[1:]).clone()
    gate, up = weights[source + "mlp.linear_fc1.weight"].chunk(2)
    result[target + "mlp.gate_proj.weight"] = gate.clone()
    result[target + "mlp.up_proj.weight"] = up.clone()
    return result
