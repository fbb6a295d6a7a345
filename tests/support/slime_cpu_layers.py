"""Transformer layers for slime's `--spec`, of Megatron's local layers, with the names that slime's converters expect.

Transformer Engine fuses a norm with the linear layer after it, and takes packed rows; both are needed here without it.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build


class Norm(torch.nn.RMSNorm):
    """RMSNorm whose gradient Megatron sums over ranks that each have a part of the sequence, as it does Transformer
    Engine's; its own local norm refuses sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **settings: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """RMSNorm and a column-parallel linear layer, with the parameter names of Transformer Engine's fused layer."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **settings: Any) -> None:
        super().__init__(input_size, output_size, config=config, **settings)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._epsilon = config.layernorm_epsilon

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        normed = torch.nn.functional.rms_norm(hidden, (hidden.shape[-1],), self.layer_norm_weight, self._epsilon)
        return super().forward(normed, *args, **kwargs)


class PackedAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention within each row of a packed sequence."""

    def forward(self, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        packed = kwargs.get("packed_seq_params")
        assert packed is not None, "slime packs all rows"
        query, key, value = (part.squeeze(1) if part.dim() == 4 else part for part in (query, key, value))
        attended = []
        for start, end in pairwise(packed.cu_seqlens_q.tolist()):
            query_HTD, key_HTD, value_HTD = (part[start:end].transpose(0, 1)[None] for part in (query, key, value))
            result = torch.nn.functional.scaled_dot_product_attention(
                query_HTD, key_HTD, value_HTD, is_causal=True, enable_gqa=True, scale=self.softmax_scale
            )
            attended.append(result[0].transpose(0, 1).reshape(end - start, -1))
        return torch.cat(attended)


def get_spec(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Return the specification of the layers, as slime calls it for `--spec support.slime_cpu_layers get_spec`."""
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    parts.self_attention.submodules.linear_qkv = NormedColumnParallelLinear
    parts.self_attention.submodules.core_attention = PackedAttention
    parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = Norm
    parts.mlp.submodules.linear_fc1 = NormedColumnParallelLinear
    layers = [spec] * get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=Norm)


def get_spec_but_on_rank_1(args: Any, config: Any, vp_stage: int | None) -> Any:
    """Return the same, except on rank 1, which fails while rank 0 waits for it in a collective."""
    if os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has no layers")
    return get_spec(args, config, vp_stage)
