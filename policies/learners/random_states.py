"""States of all random generators in a learner's process: Python's, numpy's, torch's, each GPU's and Megatron's.

Invariant: `restore_random_states(random_states())` does not change what is drawn next. The values are plain data and
tensors, which checkpoints load without running code.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.tensor_parallel import get_cuda_rng_tracker


def random_states() -> dict[str, Any]:
    """Return the states of all generators, for a checkpoint."""
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
    """Restore the states. If the number of GPUs differs, the GPUs'
    generators keep their seeds."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    keys = np.array(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state(states["numpy"] | {"state": {**states["numpy"]["state"], "key": keys}})
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    if states["megatron"]:
        get_cuda_rng_tracker().set_states(states["megatron"])
