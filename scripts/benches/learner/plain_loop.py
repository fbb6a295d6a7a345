"""The baseline of the learner bench: a training step in plain PyTorch, without Megatron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from headrace.buffer.trajectories.types import BatchItem
from headrace.policies.models.qwen_config import QwenConfig

if TYPE_CHECKING:
    from torch import Tensor


class PlainLoop:
    """Weights of a dense Qwen3 model by their Hugging Face names, with AdamW."""

    def __init__(self, config: QwenConfig, weights: Mapping[str, Tensor], *, learning_rate: float) -> None:
        self._config = config
        self._weights = {name: torch.nn.Parameter(tensor.float().clone()) for name, tensor in weights.items()}
        self._optimizer = torch.optim.AdamW(self._weights.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0)

    def step(self, items: Sequence[BatchItem], packs: Sequence[Sequence[int]]) -> float:
        """Train on items with one row each, in the given micro-batches; return the norm of the gradient."""
        for indices in packs:
            rows = [items[index] for index in indices]
            counts = [int(item.trajectory.rows[0].loss_mask_T.sum()) for item in rows]
            scales = [item.advantage / (len(items) * count) for item, count in zip(rows, counts, strict=True)]
            scale_N = torch.repeat_interleave(torch.tensor(scales), torch.tensor(counts))
            logprobs_N = self.logprobs(rows)
            (-(logprobs_N - logprobs_N.detach()).exp() * scale_N).sum().backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), 1.0))
        self._optimizer.step()
        self._optimizer.zero_grad()
        return norm

    def logprobs(self, items: Sequence[BatchItem]) -> Tensor:
        """Return the log-probabilities of all trained tokens of the items' rows, of shape N."""
        tokens = [torch.from_numpy(item.trajectory.rows[0].tokens_T).long() for item in items]
        masks = [torch.from_numpy(item.trajectory.rows[0].loss_mask_T) for item in items]
        tokens_BT = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        trained_BT = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)
        hidden_ND = self._hidden(tokens_BT)[:, :-1][trained_BT[:, 1:]]
        logits_NV = hidden_ND @ self._weights["model.embed_tokens.weight"].T
        return logits_NV.log_softmax(-1).gather(-1, tokens_BT[:, 1:][trained_BT[:, 1:]][:, None])[:, 0]

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        config, (rows, length) = self._config, tokens_BT.shape
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(length), frequencies)
        cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
        hidden = F.embedding(tokens_BT, self._weights["model.embed_tokens.weight"])
        for layer in range(config.num_hidden_layers):

            def weight(name: str, layer: int = layer) -> Tensor:
                return self._weights[f"model.layers.{layer}.{name}.weight"]

            def norm(values: Tensor, name: str) -> Tensor:
                return F.rms_norm(values, values.shape[-1:], weight(name), config.rms_norm_eps)

            normed = norm(hidden, "input_layernorm")
            query, key, value = (
                F.linear(normed, weight(f"self_attn.{name}_proj")).view(rows, length, -1, config.head_dim)
                for name in "qkv"
            )
            query, key = norm(query, "self_attn.q_norm").transpose(1, 2), norm(key, "self_attn.k_norm").transpose(1, 2)
            query, key = (part * cos + part.roll(config.head_dim // 2, -1) * sin for part in (query, key))
            attended = F.scaled_dot_product_attention(
                query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True
            )
            hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), weight("self_attn.o_proj"))
            normed = norm(hidden, "post_attention_layernorm")
            gated = F.silu(F.linear(normed, weight("mlp.gate_proj"))) * F.linear(normed, weight("mlp.up_proj"))
            hidden = hidden + F.linear(gated, weight("mlp.down_proj"))
        return F.rms_norm(hidden, hidden.shape[-1:], self._weights["model.norm.weight"], config.rms_norm_eps)
