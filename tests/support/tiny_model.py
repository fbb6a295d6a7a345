"""A random tiny Qwen model directory in Hugging Face format, with a byte-level tokenizer of its own.

The weights are scaled so that the distribution is far from uniform: a parity test against near-uniform logits could
not fail.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

EOS_TOKEN = "<|end|>"
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
"""Changes of `KEYS` for a model of Qwen2.5's architecture."""
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
        if len(shape) == 1:
            tensors[name] = noise if name.endswith("bias") else 1 + 0.1 * noise
        else:
            tensors[name] = noise * (0.3 if "embed" in name else shape[1] ** -0.5)
    return tensors


def write_tiny_model(directory: Path, *, seed: int = 0, tied: bool = True, files: int = 1, **changes: object) -> Path:
    """Write config.json (with `changes` of its keys), generation_config.json, tokenizer.json and the weights, in one
    file or in several with an index; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(directory / "tokenizer.json")
    keys = {**KEYS, "vocab_size": vocabulary, "eos_token_id": vocabulary - 1, "tie_word_embeddings": tied, **changes}
    (directory / "config.json").write_text(json.dumps(keys))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": vocabulary - 1}))
    write_weights(directory, random_tensors(keys, seed), files)
    return directory


def write_weights(directory: Path, tensors: dict[str, Tensor], files: int = 1) -> None:
    """Write `model.safetensors`, or several files with the names that Hugging Face gives them, and their index."""
    from safetensors.torch import save_file

    if files == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {name: f"model-{1 + at % files:05}-of-{files:05}.safetensors" for at, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
