"""Facts of a model for the choice of settings: its size, its context and what a token costs. Needs no torch.

Invariants:
- Everything is read from the model's directory. Any architecture with Hugging Face's usual keys will do, a mixture of
  experts and layers of linear attention included; nested `text_config` is followed.
- The number of parameters is that of the weight files, or of their index where the files themselves are not here. It is
  estimated from config.json (Qwen's dense, mixture and hybrid models within 1 %) only without both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.model_files import INDEX, read_shapes, weight_files
from headrace.policies.tokens.model_keys import read_language_keys

_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes of a language model. `experts` are the parameters of all routed experts, `active` those that compute one
    token; a dense model has no experts."""

    parameters: int
    experts: int
    active: int
    layers: int
    hidden: int
    vocabulary: int
    context: int
    """Tokens for which positions are defined, scaled positions included."""
    cache_values: int
    """Keys and values that one token leaves in the cache, as numbers, not bytes."""

    @classmethod
    def read(cls, model_dir: Path) -> ModelFacts:
        """Read a model directory. Raises ModelInvalid naming the file and the key."""
        path = model_dir / "config.json"
        keys = read_language_keys(path)
        return cls.of(keys, stored=_stored(model_dir, keys), source=str(path))

    @classmethod
    def of(cls, keys: Mapping[str, Any], *, stored: int = 0, source: str = "config.json") -> ModelFacts:
        """Return the facts that the keys of a config.json give, with `stored` parameters if they have been counted.
        Raises ModelInvalid."""

        def size(name: str) -> int:
            found = keys.get(name)
            if not isinstance(found, int) or found < 1:
                raise ModelInvalid(
                    f"{source}: {name} is {found}, but the memory follows from it; name a language model"
                )
            return found

        layers, hidden, heads = size("num_hidden_layers"), size("hidden_size"), size("num_attention_heads")
        head = keys.get("head_dim") or hidden // heads
        kinds = keys.get("layer_types") or _hybrid(keys, layers)
        full = sum("linear" not in str(kind) for kind in kinds)
        groups = keys.get("num_key_value_heads") or heads
        expert = 3 * hidden * (keys.get("moe_intermediate_size") or 0)
        count = keys.get("num_experts") or keys.get("n_routed_experts") or keys.get("num_local_experts") or 0
        experts = layers * count * expert
        used = layers * (keys.get("num_experts_per_tok") or 0) * expert
        parameters = stored or experts + _shared(keys, layers, hidden, heads * head, groups * head, full)
        return cls(
            parameters=parameters,
            experts=experts,
            active=parameters - experts + min(used, experts),
            layers=layers,
            hidden=hidden,
            vocabulary=size("vocab_size"),
            context=_context(keys),
            cache_values=2 * full * groups * head,
        )


def _hybrid(keys: Mapping[str, Any], layers: int) -> list[str]:
    every = keys.get("full_attention_interval") or 1
    return ["full" if (layer + 1) % every == 0 else "linear" for layer in range(layers)]


def _context(keys: Mapping[str, Any]) -> int:
    rope = keys.get("rope_parameters") or keys.get("rope_scaling") or {}
    stated = int(keys.get("max_position_embeddings") or 32_768)
    if not isinstance(rope, dict) or not isinstance(factor := rope.get("factor"), int | float):
        return stated
    # Qwen's models state the positions before YaRN, others those after it.
    return max(stated, int(factor * (rope.get("original_max_position_embeddings") or stated)))


def _stored(model_dir: Path, keys: Mapping[str, Any]) -> int:
    """Return the number of parameters in the weight files, or by their index; 0 without both."""
    try:
        weight_files(model_dir)
        return sum(math.prod(shape) for shape in read_shapes(model_dir).values())
    except ModelInvalid:
        pass
    try:
        total = json.loads((model_dir / INDEX).read_bytes())["metadata"]["total_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return int(total) // _BYTES.get(str(keys.get("dtype") or keys.get("torch_dtype")), 2)


def _shared(keys: Mapping[str, Any], layers: int, hidden: int, queries: int, values: int, full: int) -> int:
    """Estimate the parameters outside routed experts; norms are too few to count. `queries` and `values` are the widths
    of all query and all key heads, `full` the number of layers with full attention."""
    gate = 2 if keys.get("attn_output_gate") or full < layers else 1  # hybrid Qwen models gate what attention gives
    attention = hidden * queries * (gate + 1) + 2 * hidden * values
    key = (keys.get("linear_num_key_heads") or 0) * (keys.get("linear_key_head_dim") or 0)
    value = (keys.get("linear_num_value_heads") or 0) * (keys.get("linear_value_head_dim") or 0)
    linear = hidden * (2 * key + 3 * value)
    if keys.get("moe_intermediate_size"):
        wide = keys.get("shared_expert_intermediate_size") or 0
    else:
        wide = keys.get("intermediate_size") or 4 * hidden
    embeddings = (1 if keys.get("tie_word_embeddings") else 2) * int(keys.get("vocab_size") or 0) * hidden
    return embeddings + full * attention + (layers - full) * linear + layers * 3 * hidden * wide
