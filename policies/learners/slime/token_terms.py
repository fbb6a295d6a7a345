"""What slime's training processes take from their data for single tokens, and compute beside slime's own loss.

Invariants:
- slime's own loss function computes the policy loss, the KL and the entropy. The term of observations is added to it.
- Arrays of the data (`batches`) are over the tokens of a response; in a rank, over the part that context parallelism
  leaves there, in the order of slime's log-probabilities.

Importing this module imports torch; its functions need slime and Megatron. Shapes: R tokens of a response, V
vocabulary, M observed tokens with a weight, N trained tokens of a step.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.policies.learners.logprob_drift import DriftSums
from headrace.policies.learners.slime.batches import UNTRAINED

ARRAYS = ("advantages", "values", "returns")


def take_arrays(data: dict[str, Any], device: Any) -> dict[str, Any]:
    """Turn the arrays of a rank's data into tensors of the part of each row that the rank has, and return the data."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    for name in ARRAYS:
        rows = zip(data[name], data["total_lengths"], data["response_lengths"], strict=True)
        data[name] = [slice_log_prob_with_cp(torch.tensor(row_R), *lengths).to(device) for row_R, *lengths in rows]
    return data


def keep_advantages(args: Namespace, data: dict[str, Any]) -> None:
    """Leave advantages and returns as they came (slime's `--custom-advantage-function-path`)."""


def observed_loss(
    args: Namespace, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return slime's policy loss with the weighted cross-entropy of observations (slime's
    `--custom-loss-function-path`), and the metrics of both. `logits` are of shape (1, tokens, V), without the
    temperature: observations were not sampled."""
    from megatron.core import mpu
    from slime.backends.megatron_utils import loss as slimes
    from slime.utils.ppo_utils import calculate_log_probs_and_entropy

    loss, metrics = slimes.policy_loss_function(args, batch, logits, sum_of_sample_mean)
    lengths = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
    responses = slimes.get_responses(logits, args=args, apply_temperature=False, **lengths)
    # Only what has a weight, because each log-probability keeps a row of V for the backward pass.
    observed = [
        (logits_RV[weights_R > 0], tokens_R[weights_R > 0], weights_R[weights_R > 0])
        for (logits_RV, tokens_R), weights_R in zip(responses, batch["returns"], strict=True)
    ]
    logits_MV, tokens_M, weights_M = (torch.cat(part) for part in zip(*observed, strict=True))
    logprobs_M, _ = calculate_log_probs_and_entropy(
        logits_MV, tokens_M, mpu.get_tensor_model_parallel_group(), chunk_size=args.log_probs_chunk_size
    )
    term = -(logprobs_M.flatten() * weights_M).sum()
    scaled = term.detach()
    return loss + term, metrics | {"loss": metrics["loss"] + scaled, "observation_loss_scaled": scaled}


def compared(batch: dict[str, Any], logprobs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return log(current / behaviour) of the trained tokens of a micro-batch, and their staleness."""
    keys = torch.cat(batch["values"])
    differences = torch.cat(list(logprobs)).detach().double() - torch.cat(batch["rollout_log_probs"])
    return differences[keys > UNTRAINED], keys[keys > UNTRAINED]


def drift_sums(parts: Sequence[tuple[Tensor, Tensor]]) -> DriftSums:
    """Return the comparison of several micro-batches; an empty one where other ranks have the same tokens."""
    from megatron.core import mpu

    if not parts or mpu.get_tensor_model_parallel_rank() > 0:
        return DriftSums()
    differences_N, keys_N = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
    by_staleness = {int(key): (differences_N[keys_N == key],) for key in np.unique(keys_N)}
    return DriftSums(differences=by_staleness, tokens=len(keys_N))
