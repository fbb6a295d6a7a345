"""Saves and loads model and optimizer with megatron-core's distributed checkpointing.

Invariants:
- The format on disk is Megatron's `torch_dist`: `dist_checkpointing.load` reads it, even with a different parallel
  size.
- Saving runs in this process and thread: Megatron's writer forks workers and spawns a manager, which is not safe in a
  process with Ray's threads.
- Saving and loading are bit-exact, and all ranks do them together. Only rank 0 writes, because all have the same state;
  so a checkpoint does not depend on their number.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded

from headrace.policies.errors import CheckpointUnreadable
from headrace.policies.learners.megatron_optimizer import MainOptimizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
    from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class InProcessSave(torch_strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's sharded save with torch's own writer, which writes and fsyncs in the calling thread."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        grouped = torch_strategies._replace_state_dict_keys_with_sharded_keys  # noqa: SLF001  (Megatron has no public one)
        by_key, _, _ = grouped(sharded_state_dict, True)
        planner = torch_strategies.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        save_sharded(
            torch_strategies.mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=planner,
        )


def save_state(directory: Path, model: GPTModel, optimizer: MainOptimizer) -> None:
    """Write the main weights, AdamW's moments and step count, and all random states into the empty `directory`. Raises
    OSError."""
    updates = max((int(state["step"]) for state in optimizer.adamw.state.values()), default=0)
    state = _sharded(model, optimizer, updates) | {"updates": updates, "random": random_states()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist_checkpointing.save(
                state,
                str(directory),
                sharded_strategy=InProcessSave(),
                # The ranks' random states differ, those of rank 0 are kept: a step draws no random numbers.
                preprocess_common_before_consistancy_check=lambda common: common | {"random": None},
            )
    except CheckpointException as error:
        # It derives from BaseException, which would end the learner's process without a word. Of a full disk, torch
        # says only that its position in the file is unexpected.
        raise OSError(f"{directory} cannot be written; check the space on its disk ({_reason(error)})") from error


def load_state(directory: Path, model: GPTModel, optimizer: MainOptimizer) -> None:
    """Load the files written by `save_state` into a model of the same shape and a new optimizer. Raises
    CheckpointUnreadable."""
    try:
        loaded, updates = _load(directory, model, optimizer)
    except CheckpointException as error:
        raise CheckpointUnreadable(f"{directory} cannot be loaded: {_reason(error)}") from error
    optimizer.assign(loaded["model"])
    if updates:
        for name, weight in optimizer.weights.items():
            for key in MOMENTS:
                optimizer.adamw.state[weight][key].copy_(loaded["moments"][key][name])
    restore_random_states(loaded["random"])


def _load(directory: Path, model: GPTModel, optimizer: MainOptimizer) -> tuple[dict[str, Any], int]:
    """Return the loaded state and its number of updates, after filling `optimizer` with moments to load into."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        updates = int(dist_checkpointing.load_common_state_dict(str(directory))["updates"])
        if updates:
            for weight in optimizer.weights.values():
                moments = {key: torch.zeros_like(weight) for key in MOMENTS}
                optimizer.adamw.state[weight] = {"step": torch.tensor(float(updates)), **moments}
        return dist_checkpointing.load(_sharded(model, optimizer, updates), str(directory)), updates


def _reason(error: CheckpointException) -> str:
    return "; ".join(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()) or str(error)


def _sharded(model: GPTModel, optimizer: MainOptimizer, updates: int) -> dict[str, Any]:
    tensors = model.sharded_state_dict()
    for name, weight in optimizer.weights.items():
        # In fp32 whatever the model's dtype, so that a run can be resumed in another one.
        main = make_sharded_optimizer_tensor(tensors[name], weight.data, "main")
        tensors[name] = replace(main, key=tensors[name].key)
    if not updates:
        return {"model": tensors}
    moments = {
        key: {
            name: make_sharded_optimizer_tensor(tensors[name], optimizer.adamw.state[weight][key], f"optimizer.{key}")
            for name, weight in optimizer.weights.items()
        }
        for key in MOMENTS
    }
    return {"model": tensors, "moments": moments}


def random_states() -> dict[str, Any]:
    """Return the states of all random generators in this process (Python's, numpy's, torch's, each GPU's, Megatron's),
    as plain data and tensors. `restore_random_states(random_states())` does not change what is drawn next."""
    version, words, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=False)
    return {
        "python": (version, list(words), gauss),
        "numpy": of_numpy | {"state": {**of_numpy["state"], "key": of_numpy["state"]["key"].tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "megatron": dict(get_cuda_rng_tracker().get_states()),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore the states. If the number of GPUs differs, the GPUs' generators keep their seeds."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    keys = np.array(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(states["numpy"] | {"state": {**states["numpy"]["state"], "key": keys}})
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    if states["megatron"]:
        get_cuda_rng_tracker().set_states(states["megatron"])
