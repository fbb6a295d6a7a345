"""Builds megatron-core's GPTModel from a Hugging Face directory of a dense Qwen model.

Invariants:
- The model is megatron-core's, without kernels that need a GPU; its sizes are read from config.json.
- Its output is the log-probabilities and entropies of the trained tokens: logits exist only for a few of their
  positions at once, and for no other position.
- Rows are padded on the right and attention is causal, so no position attends to padding. It keeps no T x T matrix:
  `scaled_dot_product_attention` runs in blocks, on CPUs and GPUs.
- Parameters have the same names and layouts as in Megatron's local layer spec, so checkpoints are the same.
- Recompute does not change results: the layers have no dropout and use no random numbers.
- Importing this module imports torch and megatron, so only the learner's thread may import it.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint

from headrace.policies.errors import ModelInvalid
from headrace.policies.learners.logprob_head import trained_logprobs
from headrace.policies.models.hf_mapping import Weights, to_hugging_face, to_megatron
from headrace.policies.models.model_files import weight_files
from headrace.policies.models.qwen_config import QwenConfig

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec

with warnings.catch_warnings():
    # Megatron warns of each missing accelerator library, and of deprecated modules that it imports itself.
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_layer import TransformerLayer


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


def transformer_config(shape: QwenConfig, dtype: torch.dtype = torch.float32) -> TransformerConfig:
    """Return Megatron's configuration for `shape`, without the fusions that need CUDA."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(
            num_layers=shape.num_hidden_layers,
            hidden_size=shape.hidden_size,
            ffn_hidden_size=shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_query_groups=shape.num_key_value_heads,
            kv_channels=shape.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=shape.rms_norm_eps,
            qk_layernorm=shape.qk_norm,
            add_qkv_bias=shape.qkv_bias,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_cpu_initialization=True,
            perform_initialization=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            apply_rope_fusion=False,
            persist_layer_norm=False,
        )


ModelT = TypeVar("ModelT", bound="PolicyModel")


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPTModel whose forward pass ends in the log-probabilities of trained tokens instead of logits."""

    def forward(
        self, tokens_BT: torch.Tensor, trained_BT: torch.Tensor, temperatures_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probabilities and entropies of the N trained tokens; see `trained_logprobs`."""
        tied = self.share_embeddings_and_output_weights
        weight_VD = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return trained_logprobs(self.hidden_BTD(tokens_BT), weight_VD, tokens_BT, trained_BT, temperatures_N)

    def hidden_BTD(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states."""
        positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device).expand_as(tokens_BT)
        hidden_TBD = self.decoder(
            hidden_states=self.embedding(input_ids=tokens_BT, position_ids=positions_BT),
            attention_mask=None,
            rotary_pos_emb=self.rotary_pos_emb(tokens_BT.shape[1]),
        )
        hidden_BTD: torch.Tensor = hidden_TBD.transpose(0, 1)
        return hidden_BTD


class ValueModel(PolicyModel):
    """The same model with a scalar for each position instead of logits."""

    value_head: torch.nn.Linear

    def forward(self, tokens_BT: torch.Tensor, trained_BT: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Return the values, in at least fp32, of the positions before the N trained tokens in row-major order."""
        hidden_ND = self.hidden_BTD(tokens_BT)[:, :-1][trained_BT[:, 1:]]
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        weight_1D, bias_1 = self.value_head.weight.to(wide), self.value_head.bias.to(wide)
        return torch.nn.functional.linear(hidden_ND.to(wide), weight_1D, bias_1)[:, 0]


def build_value_model(shape: QwenConfig, config: TransformerConfig, *, recompute: bool = False) -> ValueModel:
    """Return an uninitialised value model; see `build_model`. It has no output layer, whatever the policy has."""
    model = _build(ValueModel, shape, config, recompute=recompute, tied=True)
    model.value_head = torch.nn.Linear(shape.hidden_size, 1, dtype=config.params_dtype)
    return model


def build_model(shape: QwenConfig, config: TransformerConfig, *, recompute: bool = False) -> PolicyModel:
    """Return an uninitialised model in the dtype of `config`. `recompute` computes each layer's activations again in
    the backward pass. Needs Megatron's model-parallel groups."""
    return _build(PolicyModel, shape, config, recompute=recompute, tied=shape.tie_word_embeddings)


def _build(kind: type[ModelT], shape: QwenConfig, config: TransformerConfig, *, recompute: bool, tied: bool) -> ModelT:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = kind(
            config,
            layer_spec(qk_norm=shape.qk_norm, recompute=recompute),
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.max_position_embeddings,
            share_embeddings_and_output_weights=tied,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
            parallel_output=False,
        )
    # Megatron creates norms in fp32.
    converted: ModelT = model.to(config.params_dtype)
    return converted


def read_weights(model_dir: Path, shape: QwenConfig) -> Weights:
    """Read the weights of a model directory in fp32, with Megatron's names. Raises ModelInvalid when they are
    unreadable or do not fit."""
    weights: Weights = {}
    for path in weight_files(model_dir):
        try:
            weights |= {name: tensor.float() for name, tensor in load_file(path).items()}
        except (OSError, SafetensorError) as error:
            raise ModelInvalid(f"cannot read {path}: {error}") from error
    return to_megatron(weights, shape)


def export_weights(model: GPTModel, shape: QwenConfig) -> Weights:
    """Return a copy of the weights with Hugging Face names, in the model's dtype, on the CPU."""
    named = {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}
    return to_hugging_face(named, shape)
