"""Megatron's process-wide state: process group, model-parallel groups and random state.

Invariants:
- A process is in one world, whose rendezvous listens only on a free port on 127.0.0.1: all ranks are on one host.
- All ranks have the whole model, and each trains its part of a batch (data parallelism).
- `stop` undoes everything that `start` began, even if `start` failed.
- One function of torch is replaced, and only where the learner trains on a CPU. (Megatron's checkpoint writer would
  also need `torch.cuda.synchronize`, and its optimizer two more functions; neither is used, see `megatron_checkpoint`.)
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed

from headrace.policies.errors import DeviceMissing
from headrace.policies.push.process_group import choose_interface, host_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel


SOLE_TIMEOUT_S = 60.0
"""Time limit of the collectives of a rank that is alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class World:
    """Place of this process among the `size` ranks. `store` connects them; in a collective, a rank waits for the others
    for at most `timeout_s`."""

    rank: int
    size: int
    store: Store
    timeout_s: float


def sole_world() -> World:
    """Return a world of one rank. Raises GroupFailed."""
    return World(rank=0, size=1, store=host_store("127.0.0.1", 1, SOLE_TIMEOUT_S), timeout_s=SOLE_TIMEOUT_S)


def start(
    seed: int, device: Literal["cpu", "cuda"] = "cpu", *, threads: int = 1, world: World | None = None
) -> torch.device:
    """Join `world` (by default as its only rank), with nccl on a GPU or gloo on the CPU, and return the device to train
    on. Raises DeviceMissing."""
    cuda = device == "cuda"
    if cuda and not torch.cuda.is_available():
        raise DeviceMissing(
            f"learner.device is cuda, but torch {torch.__version__} finds no CUDA device (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): install a CUDA build of torch on a host with a "
            "GPU, or set learner.device to cpu"
        )
    if not cuda:
        use_cpu_device()
    # The default is one thread, because engines and rollouts share the cores.
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    choose_interface("127.0.0.1")
    world = world or sole_world()
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo",
        store=world.store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout_s),
    )
    parallel_state.initialize_model_parallel(1, 1)
    # Megatron's tracker of random states for training needs CUDA; the one for inference does not.
    tensor_parallel.model_parallel_cuda_manual_seed(seed, inference_rng_tracker=not cuda)
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def stop() -> None:
    """Destroy the groups; a process that exits with an open gloo group aborts."""
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def use_cpu_device() -> None:
    """Make `torch.cuda.current_device` return the CPU device, because Megatron passes its result as `device=` for
    gradient buffers and RoPE frequencies. Also needed where CUDA is available but the learner trains on the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
