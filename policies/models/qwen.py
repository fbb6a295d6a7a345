"""Compact forward pass of a Qwen model for one CPU thread: fp32, eager, with a key-value cache for continuous batching.

Invariants:
- `QwenWeights` is allocated once, and written only while no forward pass reads it: weights are swapped by exchanging
  two sets, never partly.
- All parameters are in one block of memory, in the order of `QwenConfig.shapes`, where parameters of one matrix are
  adjacent: adjacent parameters can be received in place.
- Rows `[0, B)` of the cache are the running batch, each from position 0 of its sequence, so attention needs no gather.
- `decode`, `prefill` and `extend` write only the cache rows they are given.

Shapes: B rows, T tokens, V vocabulary, D head dimension, H query heads, G key-value heads, C cache capacity in tokens.
The architecture is that of Qwen3ForCausalLM (Qwen3 Technical Report, arXiv 2505.09388): pre-norm, RMS norm of queries
and keys per head, rotary positions over half-split dimensions, grouped-query attention, SwiGLU; or that of
Qwen2ForCausalLM (Qwen2.5 Technical Report, arXiv 2412.15115), with biases of queries, keys and values instead of the
norms of heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.model_files import weight_files
from headrace.policies.models.qwen_config import TIED_HEAD, QwenConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """Weights of one decoder layer; query, key and value projections are one matrix, and so are gate and up."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """Norm weights of the H query heads and G key heads, `(H + G, D)`, repeated from the parameters for every head."""
    query_heads: int
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def spread_norms(self, slots: Mapping[str, Tensor], layer: int) -> None:
        """Fill `qk_norm` from the norm parameters of queries and keys, if the model has them."""
        if self.qk_norm is None:
            return
        self.qk_norm[: self.query_heads] = slots[f"model.layers.{layer}.self_attn.q_norm.weight"]
        self.qk_norm[self.query_heads :] = slots[f"model.layers.{layer}.self_attn.k_norm.weight"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QwenWeights:
    """Set of weights in fp32. `slots` are its parameters by Hugging Face name, as views of `memory`; `dtypes` contains
    the original dtype of each parameter that has been loaded since `forget`."""

    memory: Tensor
    slots: Mapping[str, Tensor]
    dtypes: dict[str, torch.dtype]
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor

    @classmethod
    def allocate(cls, config: QwenConfig) -> QwenWeights:
        """Allocate uninitialised weights."""
        return cls.over(config, torch.empty(sum(math.prod(shape) for shape in config.shapes().values())))

    @classmethod
    def over(cls, config: QwenConfig, memory: Tensor) -> QwenWeights:
        """Return weights whose parameters are views of `memory`, in the order of `config.shapes()`."""
        shapes = config.shapes()
        sizes = [math.prod(shape) for shape in shapes.values()]
        parts = torch.split(memory, sizes)
        slots = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        embedding = slots["model.embed_tokens.weight"]
        return cls(
            memory=memory,
            slots=slots,
            dtypes={},
            embedding=embedding,
            layers=tuple(layer_weights(config, memory, slots, layer) for layer in range(config.num_hidden_layers)),
            norm=slots["model.norm.weight"],
            head=embedding if config.tie_word_embeddings else slots[TIED_HEAD],
        )

    def place(self, names: Sequence[str]) -> Tensor | None:
        """Return the memory of these parameters if they are adjacent in this order, else None."""
        end = first = self.slots[names[0]].storage_offset()
        for name in names:
            if self.slots[name].storage_offset() != end:
                return None
            end += self.slots[name].numel()
        return self.memory[first:end]

    def load(self, name: str, tensor: Tensor) -> None:
        """Load one parameter. Raises ModelInvalid if it is unknown, has another shape, or is not finite."""
        slot = self.slots.get(name)
        if slot is None or slot.shape != tensor.shape:
            expected = None if slot is None else tuple(slot.shape)
            raise ModelInvalid(f"parameter {name} has shape {tuple(tensor.shape)}, but the config requires {expected}")
        slot.copy_(tensor)
        self.accept(name, tensor.dtype)

    def accept(self, name: str, dtype: torch.dtype) -> None:
        """Mark a parameter that was received in place as loaded. Raises ModelInvalid if it is not finite."""
        # Not `isfinite`, which allocates a tensor and is slower than a copy; NaN and infinity appear in the extremes.
        low, high = self.slots[name].aminmax()
        if not math.isfinite(low) or not math.isfinite(high):
            raise ModelInvalid(f"parameter {name} contains NaN or infinity")
        self.dtypes[name] = dtype

    def missing(self) -> list[str]:
        """Return the names of parameters that have not been loaded since `forget`."""
        return [name for name in self.slots if name not in self.dtypes]

    def complete(self, other: QwenWeights | None) -> None:
        """Make the set ready to run by copying from `other` the parameters that have not been loaded. Raises
        ModelInvalid if any are missing and `other` is None."""
        for name in self.missing():
            if other is None:
                raise ModelInvalid(f"parameter {name} is missing")
            self.slots[name].copy_(other.slots[name])
            self.dtypes[name] = other.dtypes[name]
        for index, layer in enumerate(self.layers):
            layer.spread_norms(self.slots, index)

    def forget(self) -> None:
        """Mark all parameters as not loaded."""
        self.dtypes.clear()


def layer_weights(config: QwenConfig, memory: Tensor, slots: Mapping[str, Tensor], layer: int) -> LayerWeights:
    """Return views of one layer's parameters."""

    def joined(*names: str) -> Tensor:
        parts = [slots[f"model.layers.{layer}.{name}"] for name in names]
        first = parts[0].storage_offset()
        return memory[first : first + sum(part.numel() for part in parts)].view(-1, *parts[0].shape[1:])

    heads = config.num_attention_heads + config.num_key_value_heads
    biases = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
    return LayerWeights(
        attention_norm=joined("input_layernorm.weight"),
        qkv=joined("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        qkv_bias=joined(*biases) if config.qkv_bias else None,
        qk_norm=torch.empty(heads, config.head_dim) if config.qk_norm else None,
        query_heads=config.num_attention_heads,
        output=joined("self_attn.o_proj.weight"),
        mlp_norm=joined("post_attention_layernorm.weight"),
        gate_up=joined("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        down=joined("mlp.down_proj.weight"),
    )


def load_files(weights: QwenWeights, model_dir: Path) -> list[str]:
    """Load all parameters from a model directory, and return the names in its files that are not in the model. Raises
    ModelInvalid naming the file."""
    from safetensors import SafetensorError, safe_open

    missing, surplus = set(weights.slots), set()
    for path in weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as file:
                found = set(file.keys())
                for name in (name for name in weights.slots if name in found):
                    weights.load(name, file.get_tensor(name))
        except (OSError, SafetensorError, ModelInvalid) as error:
            raise ModelInvalid(f"{path}: {error}") from error
        missing -= found
        surplus |= found - weights.slots.keys()
    if missing:
        raise ModelInvalid(f"{path}: parameter {min(missing)} is missing")
    return sorted(surplus - {TIED_HEAD})


def read_weights(config: QwenConfig, model_dir: Path) -> QwenWeights:
    """Read the weights from a model directory. Raises ModelInvalid naming the file."""
    weights = QwenWeights.allocate(config)
    load_files(weights, model_dir)
    weights.complete(None)
    return weights


class KeyValueCache:
    """Cached keys and values of `rows` sequences of up to `capacity` tokens, `(layers, rows, G, C, D)` each."""

    def __init__(self, config: QwenConfig, *, rows: int, capacity: int) -> None:
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self.capacity = capacity

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]


class Qwen:
    """Forward passes of the model. `weights` may be replaced between calls, never during one."""

    def __init__(self, config: QwenConfig, weights: QwenWeights, *, capacity: int) -> None:
        self.config = config
        self.weights = weights
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2).float() / config.head_dim)
        angles = torch.outer(torch.arange(capacity).float(), frequencies)
        self._cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
        self._sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
        self._key_positions = torch.arange(capacity)

    @torch.inference_mode()
    def decode(self, tokens_B: Tensor, lengths_B: Sequence[int], cache: KeyValueCache) -> Tensor:
        """Process one token for each of the cache rows `[0, B)`, where `lengths_B[b]` tokens are cached. Returns logits
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
            # One key-value head serves a group of query heads, which take the dimension of the query positions.
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
    def extend(self, tokens: Sequence[int], start: int, row: int, cache: KeyValueCache) -> Tensor:
        """Fill one cache row from position `start` on; the tokens before it are already cached. Returns the logits
        after the last of these tokens, `(1, V)`."""
        end = start + len(tokens)
        cos, sin = self._cos[start:end, None], self._sin[start:end, None]
        hidden = F.embedding(torch.tensor([list(tokens)]), self.weights.embedding)
        unseen = self._key_positions[:end] > self._key_positions[start:end, None]
        mask = torch.zeros(unseen.shape).masked_fill_(unseen, float("-inf"))
        for index, layer in enumerate(self.weights.layers):
            queries, keys, values = (part.transpose(1, 2) for part in self._project(layer, hidden, cos, sin))
            cache.keys[index, row : row + 1, :, start:end] = keys
            cache.values[index, row : row + 1, :, start:end] = values
            attended = F.scaled_dot_product_attention(
                queries,
                cache.keys[index, row : row + 1, :, :end],
                cache.values[index, row : row + 1, :, :end],
                attn_mask=mask,
                enable_gqa=True,
            )
            hidden = self._finish(layer, hidden, attended.transpose(1, 2).reshape(1, len(tokens), -1))
        return self._logits(hidden[:, -1])

    @torch.inference_mode()
    def logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return logits `(B, T, V)` at every position, without a cache. Rows are padded on the right, with undefined
        logits there."""
        return self.differentiable_logits(prompts)

    def differentiable_logits(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return `logits`, whose gradient reaches the weights' memory if that requires one."""
        return self._logits(self._run(prompts, 0, None))

    def _run(self, prompts: Sequence[Sequence[int]], first_row: int, cache: KeyValueCache | None) -> Tensor:
        batch, width = len(prompts), max(len(prompt) for prompt in prompts)
        # Padding is on the right, so the causal mask alone hides it from all other tokens.
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
        """Return queries `(..., H, D)`, keys and values `(..., G, D)`, rotated and, in Qwen3, normalised."""
        config = self.config
        projected = F.linear(self._norm(hidden, layer.attention_norm), layer.qkv, layer.qkv_bias)
        heads = projected.view(*projected.shape[:-1], -1, config.head_dim)
        rotated_heads = config.num_attention_heads + config.num_key_value_heads
        rotated, values = torch.split(heads, [rotated_heads, config.num_key_value_heads], dim=-2)
        if layer.qk_norm is not None:
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
