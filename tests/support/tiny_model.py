"""A random tiny Qwen3 model directory in Hugging Face format, with a byte-level tokenizer of its own.

The weights are scaled so that the distribution is far from uniform: a parity test against near-uniform logits could
not fail.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

EOS_TOKEN = "<|end|>"
KEYS = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def write_tokenizer(path: Path) -> int:
    """Byte-level, no merges, two specials. Returns the vocabulary size; the last id is the end token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken(EOS_TOKEN, special=True)])
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


def random_tensors(keys: dict[str, object], seed: int) -> dict[str, Tensor]:
    """Parameters by Hugging Face name."""
    import torch

    from headrace.policies.models.qwen_config import QwenConfig

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in QwenConfig.from_keys(keys, source="tiny").shapes().items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * (0.3 if "embed" in name else shape[1] ** -0.5)
    return tensors


def write_tiny_model(directory: Path, *, seed: int = 0, tied: bool = True, **changes: object) -> Path:
    """Write config.json (with `changes` of its keys), generation_config.json, tokenizer.json and model.safetensors;
    returns the directory."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(directory / "tokenizer.json")
    keys = {**KEYS, "vocab_size": vocabulary, "eos_token_id": vocabulary - 1, "tie_word_embeddings": tied, **changes}
    (directory / "config.json").write_text(json.dumps(keys))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": vocabulary - 1}))
    save_file(random_tensors(keys, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory
