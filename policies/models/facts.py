"""Facts of a model for the choice of settings: its size, its context, what a token costs. Needs no torch.

Invariants:
- Any architecture with Hugging Face's usual keys will do, with experts, linear attention and a nested `text_config`.
- Parameters are counted in the weight files, or in their index where they are not here. Without both they are estimated
  from config.json: within 0.1 % for Qwen's dense, mixture and hybrid models.
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
    token; `context` has scaled positions; `cache_values` are the keys and values that a token leaves in the cache."""

    parameters: int
    experts: int
    active: int
    layers: int
    hidden: int
    vocabulary: int
    context: int
    cache_values: int

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
        for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if not isinstance(found := keys.get(name), int) or found < 1:
                raise ModelInvalid(f"{source}: {name} is {found}, but memory follows from it; name a language model")

        def number(name: str, default: int = 0) -> int:
            return int(keys.get(name) or default)

        layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
        head, kinds = number("head_dim", hidden // heads), keys.get("layer_types")
        full = layers // number("full_attention_interval", 1)
        if kinds:
            full = sum("linear" not in str(kind) for kind in kinds)
        pairs = head * number("num_key_value_heads", heads)
        routed = max(number("num_experts"), number("n_routed_experts"), number("num_local_experts"))
        # Mixtral's and gpt-oss's experts have the size of other models' dense layers.
        expert = 3 * hidden * number("moe_intermediate_size", number("intermediate_size") if routed else 0)
        experts = layers * expert * routed
        # What attention gives is gated in hybrid Qwen models. Norms are too few to count.
        attention = hidden * heads * head * (3 if full < layers else 2) + 2 * hidden * pairs
        linear_keys = number("linear_num_key_heads") * number("linear_key_head_dim")
        linear_values = number("linear_num_value_heads") * number("linear_value_head_dim")
        linear = hidden * (2 * linear_keys + 3 * linear_values)
        wide = number("shared_expert_intermediate_size") if expert else number("intermediate_size", 4 * hidden)
        embeddings = number("vocab_size") * hidden * (1 if keys.get("tie_word_embeddings") else 2)
        others = embeddings + full * attention + (layers - full) * linear + layers * 3 * hidden * wide
        parameters = stored or experts + others
        return cls(
            parameters=parameters,
            experts=experts,
            active=parameters - experts + layers * expert * number("num_experts_per_tok"),
            layers=layers,
            hidden=hidden,
            vocabulary=number("vocab_size"),
            context=_context(keys),
            cache_values=2 * full * pairs,
        )


def _context(keys: Mapping[str, Any]) -> int:
    rope, stated = (
        keys.get("rope_parameters") or keys.get("rope_scaling"),
        keys.get("max_position_embeddings") or 32_768,
    )
    if not isinstance(rope, dict) or not isinstance(factor := rope.get("factor"), int | float):
        return int(stated)
    # Qwen's models state the positions before YaRN, others those after it.
    return int(max(stated, factor * (rope.get("original_max_position_embeddings") or stated)))


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
