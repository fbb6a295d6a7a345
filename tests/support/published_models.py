"""Architectures of published models, as their config.json has them, and the number of parameters that each has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace.policies.models import tiny

_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", "vocab_size": 151936}
_HEADS = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": True}

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3
    | _HEADS
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": _QWEN3
    | _HEADS
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-8B": _QWEN3
    | _HEADS
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
    "Qwen3-32B": _QWEN3
    | _HEADS
    | {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
    | {"tie_word_embeddings": False},
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    # As github.com/JakobJohannesson/mixtral_dolphin_v2.5 has it.
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "torch_dtype": "bfloat16",
        "vocab_size": 32002,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "Qwen3.6-35B-A3B": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "vocab_size": 248320,
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 262144,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "tie_word_embeddings": False,
        },
    },
    # Sizes as slime's scripts/models/glm4.7-30B-A3B.sh and the defaults of transformers' class have them.
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "dtype": "bfloat16",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "tie_word_embeddings": False,
    },
}
PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen2.5-0.5B": 494_032_768,
    "Mixtral-8x7B": 46_702_809_088,
    "Qwen3.6-35B-A3B": 34_660_610_688,
}
"""Those of the language model, as transformers counts them when it builds the model."""


def described_model(folder: Path, name: str) -> Path:
    """The directory of a published model without its weights; the tokenizer is the tiny policy's."""
    tiny.write_description(folder / name)
    (folder / name / "config.json").write_text(json.dumps(MODELS[name]))
    return folder / name
