"""Directories with the config.json of published models, as transformers' own classes write it.

The defaults of those classes are the sizes of the models that they were written for, except for the positions' base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

# Class in transformers, and what its defaults lack: the published `rope_theta`, and the sizes of other models.
PUBLISHED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "Qwen3-4B": (
        "Qwen3Config",
        {
            "hidden_size": 2560,
            "intermediate_size": 9728,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000,
        },
    ),
    "Qwen3-8B": (
        "Qwen3Config",
        {"intermediate_size": 12288, "num_hidden_layers": 36, "num_key_value_heads": 8, "rope_theta": 1_000_000},
    ),
    "Qwen3-32B": (
        "Qwen3Config",
        {
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "rope_theta": 1_000_000,
        },
    ),
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        {"num_hidden_layers": 48, "head_dim": 128, "rope_theta": 1_000_000},
    ),
    "Qwen3.6-35B-A3B": ("Qwen3_5MoeConfig", {"rope_theta": 10_000_000}),
    "Qwen3.5-9B": ("Qwen3_5Config", {"rope_theta": 10_000_000}),
    "Qwen3-Next-80B-A3B": ("Qwen3NextConfig", {"rope_theta": 10_000_000}),
    "GLM-4.7-Flash": ("Glm4MoeLiteConfig", {"rope_theta": 1_000_000}),
    "GLM-4.5-Air": ("Glm4MoeConfig", {"rope_theta": 1_000_000}),
    "GLM-4.7": (
        "Glm4MoeConfig",
        {
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "num_hidden_layers": 92,
            "n_routed_experts": 160,
            "moe_intermediate_size": 1536,
            "rope_theta": 1_000_000,
        },
    ),
    "GLM-5": ("GlmMoeDsaConfig", {"rope_theta": 1_000_000}),
    "DeepSeek-V3": ("DeepseekV3Config", {}),
    "MiniMax-M2": ("MiniMaxM2Config", {}),
}


def write_published_config(folder: Path, name: str) -> Path:
    """Write the config.json of a published model, and return its folder."""
    import transformers

    kind, changes = PUBLISHED[name]
    # Multimodal models keep their language model's keys in a table of their own.
    nested = hasattr(getattr(transformers, kind)(), "text_config")
    getattr(transformers, kind)(**({"text_config": changes} if nested else changes)).save_pretrained(folder)
    return folder
