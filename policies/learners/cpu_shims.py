"""What megatron-core 0.16 needs to run on a machine without CUDA.

Invariants:
- Nothing is touched where CUDA is available.
- This is the only module that replaces a function of torch, and it replaces one. (Megatron's own checkpoint writer
  would also need `torch.cuda.synchronize`, its optimizer two more; neither is used, see `megatron_checkpoint`.)
"""

from __future__ import annotations

import torch


def install() -> bool:
    """Make `torch.cuda.current_device` answer the CPU device: Megatron passes its answer on as `device=` for gradient
    buffers and RoPE frequencies. True when the shim is in place, False where CUDA is available."""
    if torch.cuda.is_available():
        return False
    torch.cuda.current_device = _cpu_device  # type: ignore[assignment]
    return True


def _cpu_device() -> torch.device:
    return torch.device("cpu")
