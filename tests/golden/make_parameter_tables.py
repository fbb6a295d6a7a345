"""Writes the golden tables of published models' parameters to standard output: `PYTHONPATH=tests python FILE`.

Each model has two: as transformers saves it (`published`), and as slime exports it (`exported`).

Needs SLIME_DIR and MEGATRON_DIR. The converter of the exports is slime's own (`convert_to_hf`). The Megatron parameters
that it is given are made here, because Transformer Engine, whose layers give them their names, needs CUDA: names of
TE's layers and of slime's own (`slime_plugins/models`), sizes as slime's scripts/models and `published_models` have
them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Shape = tuple[int, ...]
JOINED_EXPERTS = ("Qwen3.6-35B-A3B",)
"""Models whose published files have all experts of a layer in one tensor, as transformers' classes have them. It would
save them one by one, unless it has loaded them joined."""


def megatron_parameters(keys: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Yield the parameters of Megatron's model, for the keys of a config.json."""
    hidden = keys["hidden_size"]
    yield "embedding.word_embeddings.weight", (keys["vocab_size"], hidden)
    for layer in range(keys["num_hidden_layers"]):
        yield from ((f"decoder.layers.{layer}.{name}", shape) for name, shape in _layer(keys, layer))
    yield "decoder.final_layernorm.weight", (hidden,)
    if not keys["tie_word_embeddings"]:
        yield "output_layer.weight", (keys["vocab_size"], hidden)


def _layer(keys: dict[str, Any], layer: int) -> Iterator[tuple[str, Shape]]:
    hidden = keys["hidden_size"]
    if "kv_lora_rank" in keys:
        # Elsewhere it is fused with the layer that follows it.
        yield "input_layernorm.weight", (hidden,)
    yield from ((f"self_attention.{name}", shape) for name, shape in _attention(keys, layer))
    experts = keys.get("num_experts") or keys.get("n_routed_experts")
    if not experts or layer < keys.get("first_k_dense_replace", 0):
        yield "mlp.linear_fc1.layer_norm_weight", (hidden,)
        yield from _feed_forward("mlp", keys["intermediate_size"], hidden)
        return
    width = keys["moe_intermediate_size"]
    yield "pre_mlp_layernorm.weight", (hidden,)
    yield "mlp.router.weight", (experts, hidden)
    if "n_routed_experts" in keys:
        yield "mlp.router.expert_bias", (experts,)
    for expert in range(experts):
        yield f"mlp.experts.linear_fc1.weight{expert}", (2 * width, hidden)
        yield f"mlp.experts.linear_fc2.weight{expert}", (hidden, width)
    if shared := keys.get("shared_expert_intermediate_size") or keys.get("n_shared_experts", 0) * width:
        yield from _feed_forward("mlp.shared_experts", shared, hidden)
    if "shared_expert_intermediate_size" in keys:
        yield "mlp.shared_experts.gate_weight", (1, hidden)


def _feed_forward(name: str, width: int, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.linear_fc1.weight", (2 * width, hidden)
    yield f"{name}.linear_fc2.weight", (hidden, width)


def _attention(keys: dict[str, Any], layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    if "kv_lora_rank" in keys:
        yield from _latent_attention(keys)
        return
    interval = keys.get("full_attention_interval")
    if interval and (layer + 1) % interval:
        yield from _linear_attention(keys)
        return
    size, groups = keys["head_dim"], keys["num_key_value_heads"]
    # With a gate, a head has twice the queries.
    queries = heads * (2 if interval else 1)
    yield "linear_qkv.layer_norm_weight", (hidden,)
    yield "linear_qkv.weight", ((queries + 2 * groups) * size, hidden)
    yield "linear_proj.weight", (hidden, heads * size)
    yield "q_layernorm.weight", (size,)
    yield "k_layernorm.weight", (size,)


def _latent_attention(keys: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, heads, positions = keys["hidden_size"], keys["num_attention_heads"], keys["qk_rope_head_dim"]
    plain, values, queries_rank, rank = (
        keys[name] for name in ("qk_nope_head_dim", "v_head_dim", "q_lora_rank", "kv_lora_rank")
    )
    yield "linear_proj.weight", (hidden, heads * values)
    yield "linear_q_down_proj.weight", (queries_rank, hidden)
    yield "linear_q_up_proj.layer_norm_weight", (queries_rank,)
    yield "linear_q_up_proj.weight", (heads * (plain + positions), queries_rank)
    yield "linear_kv_down_proj.weight", (rank + positions, hidden)
    yield "linear_kv_up_proj.layer_norm_weight", (rank,)
    yield "linear_kv_up_proj.weight", (heads * (plain + values), rank)


def _linear_attention(keys: dict[str, Any]) -> Iterator[tuple[str, Shape]]:
    hidden, heads = keys["hidden_size"], keys["linear_num_value_heads"]
    values = heads * keys["linear_value_head_dim"]
    both = 2 * keys["linear_num_key_heads"] * keys["linear_key_head_dim"] + values
    yield "input_layernorm.weight", (hidden,)
    yield "linear_attn.A_log", (heads,)
    yield "linear_attn.dt_bias", (heads,)
    yield "linear_attn.conv1d.weight", (both, 1, keys["linear_conv_kernel_dim"])
    yield "linear_attn.norm.weight", (keys["linear_value_head_dim"],)
    yield "linear_attn.in_proj_qkv.weight", (both, hidden)
    yield "linear_attn.in_proj_z.weight", (values, hidden)
    yield "linear_attn.in_proj_b.weight", (heads, hidden)
    yield "linear_attn.in_proj_a.weight", (heads, hidden)
    yield "linear_attn.out_proj.weight", (hidden, values)


def published(model: str) -> dict[str, Shape]:
    """Return the parameters of a model that transformers builds without memory, by the names that it saves them under.
    It leaves out the layers of multi-token prediction."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.core_model_loading import revert_weight_conversion

    from support.published_models import MODELS

    config = AutoConfig.for_model(**MODELS[model])
    kind = AutoModelForImageTextToText if "text_config" in MODELS[model] else AutoModelForCausalLM
    with torch.device("meta"):
        built = kind.from_config(config)
    tensors = built.state_dict()
    if model not in JOINED_EXPERTS:
        tensors = revert_weight_conversion(built, tensors)
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def exported(model: str) -> dict[str, Shape]:
    """Return the parameters that slime exports for a model of `published_models`."""
    import torch
    from slime.backends.megatron_utils.megatron_to_hf import convert_to_hf
    from transformers import AutoConfig

    from support.published_models import MODELS

    keys = MODELS[model].get("text_config", MODELS[model])
    settings = SimpleNamespace(
        vocab_size=keys["vocab_size"],
        hidden_size=keys["hidden_size"],
        num_attention_heads=keys["num_attention_heads"],
        num_query_groups=keys["num_key_value_heads"],
        num_layers=keys["num_hidden_layers"],
        kv_channels=keys.get("head_dim"),
        q_lora_rank=keys.get("q_lora_rank"),
    )
    # The name by which slime's saver chooses a converter.
    family = type(AutoConfig.for_model(**MODELS[model])).__name__.lower()
    shapes: dict[str, Shape] = {}
    for name, shape in megatron_parameters(keys):
        tensor = torch.empty(shape, device="meta")
        shapes |= {
            converted: tuple(part.shape)
            for converted, part in convert_to_hf(settings, family, f"module.module.{name}", tensor)
        }
    return shapes


def main() -> None:
    for variable in ("MEGATRON_DIR", "SLIME_DIR"):
        sys.path.insert(0, os.environ[variable])
    from support import slime_on_cpu
    from support.parameter_tables import TABLED_MODELS, table_of

    # Before slime is imported, since its replacements change torch.
    published_shapes = {model: published(model) for model in TABLED_MODELS}
    slime_on_cpu.watch_imports()
    tables = {
        model: {"published": table_of(published_shapes[model]), "exported": table_of(exported(model))}
        for model in TABLED_MODELS
    }
    sys.stdout.write(json.dumps(tables, indent=1) + "\n")


if __name__ == "__main__":
    main()
