"""Shim that megatron-core 0.16 needs on a machine without CUDA.

Invariants:
- Nothing is changed where CUDA is available.
- This is the only module that replaces a function of torch, and it replaces only one. (Megatron's checkpoint writer
  would also need `torch.cuda.synchronize`, and its optimizer would need two more functions; neither is used, see
  `megatron_checkpoint`.)
"""

from __future__ import annotations

import torch


def install() -> bool:
    """Make `torch.cuda.current_device` return the CPU device, because Megatron passes its result as `device=` for
    gradient buffers and RoPE frequencies. Returns False and changes nothing where CUDA is available."""
    if torch.cuda.is_available():
        return False
    torch.cuda.current_device = _cpu_device  # type: ignore[assignment]
    return True


def _cpu_device() -> torch.device:
    return torch.device("cpu")
