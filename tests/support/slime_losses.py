"""Program that computes gradients with slime's own loss: `python -m support.slime_losses IN OUT`, with slime and
Megatron-LM on PYTHONPATH.

IN is a file of `torch.save` with cases: flags of a command line, rows of `batches.train_data` with the reference's
log-probabilities, and logits. OUT gets, for each case, the
loss and its gradient with respect to the logits. Nothing of slime or Megatron is replaced.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import Namespace
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from headrace.policies.learners.slime.token_terms import take_arrays

FLAGS: dict[str, Any] = {
    "loss_type": "policy_loss",
    "custom_loss_function_path": "",
    "advantage_estimator": "",
    "use_rollout_logprobs": False,
    "use_opsm": False,
    "opsm_delta": 0.0001,
    "eps_clip": 0.0,
    "eps_clip_high": 0.0,
    "eps_clip_c": None,
    "use_tis": False,
    "tis_clip": 2.0,
    "tis_clip_low": 0.0,
    "custom_tis_function_path": None,
    "get_mismatch_metrics": False,
    "entropy_coef": 0.0,
    "use_kl_loss": False,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "k1",
    "use_unbiased_kl": False,
    "calculate_per_token_loss": False,
    "recompute_loss_function": False,
    "allgather_cp": False,
    "log_probs_chunk_size": -1,
    "rollout_top_p": 1.0,
    "rollout_temperature": 0.0,
}
"""Values of the flags that slime's loss reads, as slime's parser would set them by default; 0.0 and "" for those that
headrace always sets."""


def arguments_of(flags: dict[str, str]) -> Namespace:
    """Return those of the flags of a command line that the loss reads, as slime's parser would."""
    values = dict(FLAGS)
    for flag, word in flags.items():
        if (name := flag[2:].replace("-", "_")) in values:
            values[name] = True if isinstance(values[name], bool) else word
            with suppress(ValueError):
                values[name] = float(values[name])
    return Namespace(**values)


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
        batch = take_arrays({name: [row[name] for row in rows] for name in rows[0]}, "cpu")
        for name in ("loss_masks", "rollout_log_probs"):
            batch[name] = list(map(torch.tensor, batch[name]))
        batch["unconcat_tokens"] = [torch.tensor(tokens, dtype=torch.long) for tokens in batch["tokens"]]
        batch["rollout_mask_sums"] = torch.tensor(batch["rollout_mask_sums"], dtype=torch.float32)
        joined_1TV = torch.cat([parts[index] for index in indices])[None]
        loss, _, _ = loss_function(arguments_of(case["flags"]), batch, 1, case["rollouts"], joined_1TV)
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
        torch.save([loss_and_gradient(case) for case in torch.load(source, weights_only=False)], target)
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
