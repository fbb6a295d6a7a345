"""Environment of processes that share NCCL with SGLang's servers."""

from __future__ import annotations

import os


def nccl_environment() -> dict[str, str]:
    """Return the variables that SGLang sets for its servers (`entrypoints/engine.py` of 0.5.23): both ends of a group
    need the same. Values of this process's environment win, as they do there."""
    return {name: os.environ.get(name, "0") for name in ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")}
