"""The generator of a Qwen3 model of a given size with random weights, for the push bench.

Invariants:
- The embedded engine can load the directory: fp32 weights, and the tiny policy's tokenizer.
- The size of the weights is within one per cent of the given one, through the width of the feed-forward layers.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from headrace.policies.models.qwen3_config import Qwen3Config
from headrace.policies.models.tiny import model_config, write_description

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_DIM = 1024, 16, 4, 64
LAYER_BYTES = 64 * 1024 * 1024
FLOAT_BYTES = 4


def write_random_model(directory: Path, total_bytes: int) -> Path:
    """Write a model directory with about `total_bytes` of weights; return its model.safetensors."""
    import torch
    from safetensors.torch import save_file

    config = config_of(total_bytes)
    write_description(directory)
    keys = model_config() | config.model_dump()
    (directory / "config.json").write_text(json.dumps(keys))
    random = torch.Generator().manual_seed(0)
    tensors = {name: 0.02 * torch.randn(shape, generator=random) for name, shape in config.shapes().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory / "model.safetensors"


def config_of(total_bytes: int) -> Qwen3Config:
    """Return the config with as many layers as fit, and the width that fills them."""
    layers = max(1, round(total_bytes / LAYER_BYTES))

    def config(wide: int) -> Qwen3Config:
        keys = model_config() | {
            "hidden_size": HIDDEN,
            "num_hidden_layers": layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KEY_VALUE_HEADS,
            "head_dim": HEAD_DIM,
            "intermediate_size": wide,
        }
        return Qwen3Config.from_keys(keys, source="random model")

    def size(wide: int) -> int:
        return sum(math.prod(shape) for shape in config(wide).shapes().values()) * FLOAT_BYTES

    per_unit = size(2) - size(1)
    return config(max(1, round((total_bytes - size(1)) / per_unit) + 1))
