"""Shim that megatron-core 0.16 needs to train on a CPU.

Invariants:
- Nothing is changed in a process that trains on a CUDA device.
- This is the only module that replaces a function of torch, and it replaces only one. (Megatron's checkpoint writer
  would also need `torch.cuda.synchronize`, and its optimizer would need two more functions; neither is used, see
  `megatron_checkpoint`.)
"""

from __future__ import annotations

import torch


def install() -> None:
    """Make `torch.cuda.current_device` return the CPU device, because Megatron passes its result as `device=` for
    gradient buffers and RoPE frequencies. Also needed where CUDA is available but the learner trains on the CPU."""
    torch.cuda.current_device = _cpu_device  # type: ignore[assignment]


def _cpu_device() -> torch.device:
    return torch.device("cpu")
