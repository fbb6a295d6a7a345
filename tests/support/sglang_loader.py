"""Loads tensors with SGLang's loader of GLM-4.7-Flash, in SGLang's own environment: `PYTHON THIS_FILE < pushes.json`.

The input is a list of pushes; a push is a list of calls, and a call a list of `[name, shape]`. The parameters of a push
begin with 0, and all tensors that are loaded are 1. The output is a list: the smallest value of each parameter by name.

The model is built without its layers: only the parameters that the calls are about exist. What the class does after a
load (`post_load_weights`, which packs other matrices for GPUs) is left out.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


def load(calls: list[list[tuple[str, list[int]]]]) -> dict[str, float]:
    """Return the smallest value of each parameter after these calls."""
    import torch
    from sglang.srt.models.glm4_moe_lite import Glm4MoeLiteForCausalLM

    parameters: dict[str, Any] = {}
    for name, (rows, *columns) in (tensor for call in calls for tensor in call):
        fused = name.replace("kv_a_proj_with_mqa", "q_a_proj").replace("q_a_proj", "fused_qkv_a_proj_with_mqa")
        held = len(parameters.get(fused, ()))
        parameters[fused] = torch.nn.Parameter(torch.zeros(held + rows, *columns))
    model: Any = Glm4MoeLiteForCausalLM.__new__(Glm4MoeLiteForCausalLM)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(n_routed_experts=2, q_lora_rank=4, num_nextn_predict_layers=1, num_hidden_layers=47)
    model.num_fused_shared_experts = 0
    model.post_load_weights = lambda **_: None
    with torch.no_grad():
        for call in calls:
            tensors = ((name, torch.ones(shape)) for name, shape in call)
            Glm4MoeLiteForCausalLM.load_weights(model, tensors, params_dict=parameters)
    return {name: tensor.min().item() for name, tensor in parameters.items()}


if __name__ == "__main__":
    json.dump([load(calls) for calls in json.load(sys.stdin)], sys.stdout)
