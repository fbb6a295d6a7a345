"""Program that computes gradients with slime's own loss: `python -m support.slime_losses IN OUT`, with slime and
Megatron-LM on PYTHONPATH.

IN is a file of `torch.save` with cases: flags of slime (see `FLAGS`), rows and logits. OUT gets, for each case, the
loss and its gradient with respect to the logits. Nothing of slime or Megatron is replaced.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

FLAGS: dict[str, Any] = {
    "loss_type": "policy_loss",
    "use_rollout_logprobs": True,
    "use_opsm": False,
    "eps_clip_c": None,
    "use_tis": False,
    "get_mismatch_metrics": False,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "use_unbiased_kl": False,
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "allgather_cp": False,
    "log_probs_chunk_size": -1,
    "rollout_top_p": 1.0,
}
"""Values of the flags that slime's loss reads, as slime's parser would set them by default, with
--use-rollout-logprobs."""


def loss_and_gradient(case: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of all micro-batches and its gradient with respect to `case["logits"]`, of shape (T, V): the
    logits of the rows, one after another."""
    # A checkout outside the repository, which type checkers do not see.
    loss_function = import_module("slime.backends.megatron_utils.loss").loss_function
    logits_TV = case["logits"].clone().requires_grad_()
    lengths = [len(row["tokens"]) for row in case["rows"]]
    parts, total = logits_TV.split(lengths), torch.zeros(())
    for indices in case["micro_batches"]:
        rows = [case["rows"][index] for index in indices]
        batch = {
            "unconcat_tokens": [row["tokens"] for row in rows],
            "total_lengths": [len(row["tokens"]) for row in rows],
            "response_lengths": [len(row["loss_mask"]) for row in rows],
            "loss_masks": [row["loss_mask"] for row in rows],
            "rollout_mask_sums": [row["mask_sum"] for row in rows],
            "rollout_log_probs": [row["behaviour"] for row in rows],
            "ref_log_probs": [row["reference"] for row in rows],
            "advantages": [torch.full_like(row["behaviour"], row["advantage"]) for row in rows],
        }
        joined_1TV = torch.cat([parts[index] for index in indices])[None]
        loss, _, _ = loss_function(Namespace(**FLAGS | case["flags"]), batch, 1, case["rollouts"], joined_1TV)
        total = total + loss
    total.backward()  # type: ignore[no-untyped-call]
    assert logits_TV.grad is not None
    return total.detach(), logits_TV.grad


def main() -> None:
    from megatron.core import mpu

    source, target = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        mpu.initialize_model_parallel()
        torch.save([loss_and_gradient(case) for case in torch.load(source)], target)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
