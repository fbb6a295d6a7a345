"""A compact Qwen3 forward pass for one CPU thread: fp32, eager, with a key-value cache made for continuous batching.

Invariants:
- `Qwen3Weights` is immutable: new weights are a new object, so a swap is one assignment and never half done.
- Rows `[0, B)` of the cache are the running batch, each from position 0 of its sequence: no gather is ever needed to
  attend.
- `decode` and `prefill` write the cache rows they are given and nothing else.

Shapes: B rows, T tokens, V vocabulary, D head dimension, H query heads, G key-value heads, C cache capacity in tokens.
The architecture is that of Qwen3ForCausalLM (Qwen3 Technical Report, arXiv 2505.09388): pre-norm, RMS norm of queries
and keys per head, rotary positions over half-split dimensions, grouped-query attention, SwiGLU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.policies.errors import ModelInvalid

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from headrace.policies.qwen3_config import Qwen3Config


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One decoder layer; query, key and value projections and gate and up projections are one matrix each."""

    attention_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    """Norm weights of the H query heads and G key heads, `(H + G, D)`."""
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Qwen3Weights:
    """Weights ready to run, and `named`: the tensors they were made from, by Hugging Face name and in the dtype they
    came in."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    named: Mapping[str, Tensor]

    @classmethod
    def build(cls, config: Qwen3Config, named: Mapping[str, Tensor]) -> Qwen3Weights:
        """Check names and shapes, convert to fp32 and fuse. Raises ModelInvalid naming the first parameter that is
        wrong."""
        shapes = config.shapes()
        for name, shape in shapes.items():
            if name not in named:
                raise ModelInvalid(f"parameter {name} is missing")
            if tuple(named[name].shape) != shape:
                raise ModelInvalid(f"parameter {name} has shape {tuple(named[name].shape)}, the config says {shape}")
            if not named[name].isfinite().all():
                raise ModelInvalid(f"parameter {name} holds NaN or infinity")
        kept = {name: named[name] for name in shapes}
        full = {name: tensor.float() for name, tensor in kept.items()}
        embedding = full["model.embed_tokens.weight"]
        return cls(
            embedding=embedding,
            layers=tuple(fuse_layer(config, full, layer) for layer in range(config.num_hidden_layers)),
            norm=full["model.norm.weight"],
            head=embedding if config.tie_word_embeddings else full["lm_head.weight"],
            named=kept,
        )


def fuse_layer(config: Qwen3Config, full: Mapping[str, Tensor], layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}."

    def joined(*names: str) -> Tensor:
        return torch.cat([full[f"{prefix}{name}.weight"] for name in names]).contiguous()

    query_norm, key_norm = full[prefix + "self_attn.q_norm.weight"], full[prefix + "self_attn.k_norm.weight"]
    return LayerWeights(
        attention_norm=full[prefix + "input_layernorm.weight"],
        qkv=joined("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        qk_norm=torch.stack([query_norm] * config.num_attention_heads + [key_norm] * config.num_key_value_heads),
        output=full[prefix + "self_attn.o_proj.weight"],
        mlp_norm=full[prefix + "post_attention_layernorm.weight"],
        gate_up=joined("mlp.gate_proj", "mlp.up_proj"),
        down=full[prefix + "mlp.down_proj.weight"],
    )


def read_weights(config: Qwen3Config, path: Path) -> Qwen3Weights:
    """Weights of a model.safetensors. Raises ModelInvalid naming the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return Qwen3Weights.build(config, load_file(path))
    except (OSError, SafetensorError, ModelInvalid) as error:
        raise ModelInvalid(f"{path}: {error}") from error


class KeyValueCache:
    """Keys and values of `rows` sequences of up to `capacity` tokens: `(layers, rows, G, C, D)` each."""

    def __init__(self, config: Qwen3Config, *, rows: int, capacity: int) -> None:
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self.capacity = capacity

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` over row `target`."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


class Qwen3:
    """The forward passes. `weights` may be replaced between calls, never during one."""

    def __init__(self, config: Qwen3Config, weights: Qwen3Weights, *, capacity: int) -> None:
        self.config = config
        self.weights = weights
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(capacity).float(), frequencies)
        self._cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
        self._sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
        self._key_positions = torch.arange(capacity)

    @torch.inference_mode()
    def decode(self, tokens_B: Tensor, lengths_B: Sequence[int], cache: KeyValueCache) -> Tensor:
        """One token for each of the cache rows `[0, B)`; `lengths_B[b]` tokens are cached already. Returns logits
        `(B, V)`."""
        batch, longest = len(lengths_B), max(lengths_B) + 1
        positions = torch.tensor(lengths_B)
        rows = torch.arange(batch)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        hidden = F.embedding(tokens_B, self.weights.embedding)
        unseen = self._key_positions[:longest] > positions[:, None]
        mask = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf"))[:, None, None]
        for index, layer in enumerate(self.weights.layers):
            queries, keys, values = self._project(layer, hidden, cos, sin)
            key_cache, value_cache = cache.keys[index], cache.values[index]
            key_cache[rows, :, positions] = keys
            value_cache[rows, :, positions] = values
            # One key-value head serves a group of query heads: they stand where the query positions usually stand.
            grouped = queries.view(batch, self.config.num_key_value_heads, -1, self.config.head_dim)
            attended = F.scaled_dot_product_attention(
                grouped, key_cache[:batch, :, :longest], value_cache[:batch, :, :longest], attn_mask=mask
            )
            hidden = self._finish(layer, hidden, attended.reshape(batch, -1))
        return self._logits(hidden)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], first_row: int, cache: KeyValueCache) -> Tensor:
        """Fill the cache rows from `first_row` with whole prompts. Returns the logits `(B, V)` after each prompt's
        last token."""
        hidden = self._run(prompts, first_row, cache)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts])
        return self._logits(hidden[torch.arange(len(prompts)), last])

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Logits `(B, T, V)` at every position, without a cache; rows are padded on the right and garbage there."""
        return self._logits(self._run(prompts, 0, None))

    def _run(self, prompts: Sequence[Sequence[int]], first_row: int, cache: KeyValueCache | None) -> Tensor:
        batch, width = len(prompts), max(len(prompt) for prompt in prompts)
        # Padding stands on the right, so causality alone keeps it from every real token.
        tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        cos, sin = self._cos[:width, None], self._sin[:width, None]
        hidden = F.embedding(tokens, self.weights.embedding)
        for index, layer in enumerate(self.weights.layers):
            queries, keys, values = (part.transpose(1, 2) for part in self._project(layer, hidden, cos, sin))
            if cache is not None:
                cache.keys[index, first_row : first_row + batch, :, :width] = keys
                cache.values[index, first_row : first_row + batch, :, :width] = values
            attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
            hidden = self._finish(layer, hidden, attended.transpose(1, 2).reshape(batch, width, -1))
        return hidden

    def _project(self, layer: LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(..., H, D)`, keys and values `(..., G, D)`, normalised and rotated."""
        config = self.config
        projected = F.linear(self._norm(hidden, layer.attention_norm), layer.qkv)
        heads = projected.view(*projected.shape[:-1], -1, config.head_dim)
        rotated_heads = config.num_attention_heads + config.num_key_value_heads
        rotated, values = torch.split(heads, [rotated_heads, config.num_key_value_heads], dim=-2)
        rotated = F.rms_norm(rotated, (config.head_dim,), None, config.rms_norm_eps) * layer.qk_norm
        rotated = rotated * cos + rotated.roll(config.head_dim // 2, dims=-1) * sin
        queries, keys = torch.split(rotated, [config.num_attention_heads, config.num_key_value_heads], dim=-2)
        return queries, keys, values

    def _finish(self, layer: LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = hidden + F.linear(attended, layer.output)
        gate, up = F.linear(self._norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, layer.down)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self._norm(hidden, self.weights.norm), self.weights.head)
