"""The process-wide state Megatron needs: process group, model-parallel groups, random state.

Invariants:
- One world per process, with a rendezvous of its own on a free port of 127.0.0.1: no fixed port. Nothing of it
  listens on another address.
- What `start` began, `stop` ends, also after a `start` that failed half-way.
"""

from __future__ import annotations

import warnings
from datetime import timedelta

import torch
import torch.distributed

from headrace.policies.learners import cpu_shims
from headrace.policies.push.process_group import choose_interface, host_store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel

GROUP_TIMEOUT = timedelta(seconds=60)


def start(seed: int) -> torch.device:
    """Start a world of one rank over nccl on a GPU, over gloo without one, and return the device to train on."""
    cpu_shims.install()
    cuda = torch.cuda.is_available()
    # One thread: the engines and the rollouts share the cores, and a step becomes reproducible to the bit.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    choose_interface("127.0.0.1")
    store = host_store("127.0.0.1", 1, GROUP_TIMEOUT.total_seconds())
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", store=store, rank=0, world_size=1, timeout=GROUP_TIMEOUT
    )
    parallel_state.initialize_model_parallel(1, 1)
    # Megatron's training tracker of random states reads CUDA's; the inference one does without.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not cuda)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def stop() -> None:
    """End the groups; a process that exits with a live gloo group aborts."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
