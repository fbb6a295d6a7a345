"""Sizes of the model of the bench `learner`, which scripts/gpu_check uses too. Imports nothing heavy."""

from __future__ import annotations

from typing import Final

SIZES: Final = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 16_384,
}
"""Keys of its config.json: 4.3 million parameters, of which a CPU takes a step in seconds."""
