"""Layers of the learner's model: megatron-core's local ones, with attention by torch and optional recompute.

Invariants:
- Attention is causal and keeps no T x T matrix: `scaled_dot_product_attention` runs in blocks, on CPUs and GPUs.
- Parameters have the same names and layouts as in Megatron's local layer spec, so checkpoints are the same.
- Recompute does not change results: the layers have no dropout and use no random numbers.

Importing this module imports torch and megatron, so only the learner's thread may import it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

with warnings.catch_warnings():
    # Megatron warns of each missing accelerator library, and of deprecated modules that it imports itself.
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_layer import TransformerLayer

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


class BlockwiseAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention by torch's `scaled_dot_product_attention`, in the place of Megatron's `DotProductAttention`."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__(config=config)

    def forward(
        self, query_TBHD: torch.Tensor, key_TBGD: torch.Tensor, value_TBGD: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor:
        """Return the attended values, of shape (T, B, H * D). H is a multiple of G. Padding needs no mask, because rows
        are padded on the right."""
        if query_TBHD.is_cuda and query_TBHD.dtype == torch.float32:
            # On CUDA, the only blockwise kernel for fp32 needs as many key heads as query heads.
            repeats = query_TBHD.shape[2] // key_TBGD.shape[2]
            key_TBGD, value_TBGD = (part.repeat_interleave(repeats, dim=2) for part in (key_TBGD, value_TBGD))
        query_BHTD, key_BGTD, value_BGTD = (part.permute(1, 2, 0, 3) for part in (query_TBHD, key_TBGD, value_TBGD))
        attended_BHTD = torch.nn.functional.scaled_dot_product_attention(
            query_BHTD, key_BGTD, value_BGTD, is_causal=True, enable_gqa=True
        )
        return attended_BHTD.permute(2, 0, 1, 3).flatten(2)


class RecomputedLayer(TransformerLayer):  # type: ignore[misc]
    """Layer that keeps only its input, and computes its activations again in the backward pass.

    Megatron's own recompute reads the random state of a CUDA device."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `TransformerLayer.forward`."""
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def layer_spec(*, qk_norm: bool, recompute: bool) -> ModuleSpec:
    """Return the specification of a decoder layer. `recompute` makes it a `RecomputedLayer`."""
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = BlockwiseAttention
    if recompute:
        spec.module = RecomputedLayer
    return spec
