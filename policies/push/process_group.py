"""Process groups for weight transfers, formed as SGLang's `init_custom_process_group` does.

Invariants:
- A group is never the default group: it has its own TCP store at rank 0, on a free port, with the group's name as
  prefix. The store listens only on the address that its members are given.
- The group's timeout bounds its formation and every transfer. After any failure the group is discarded.
- `finish_broadcast` returns once the bytes have been sent or received, with any backend.

All functions here block: call them from a separate thread.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world

from headrace.policies.errors import GroupFailed

if TYPE_CHECKING:
    from torch import Tensor

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightGroup:
    """Process group that has been formed. It keeps `store`, the server at rank 0, alive."""

    name: str
    rank: int
    world_size: int
    backend: str
    group: dist.ProcessGroup
    store: Store


def host_store(host: str, world_size: int, timeout_s: float) -> TCPStore:
    """Open rank 0's store on a free port (`store.port`) of the address `host`. Raises GroupFailed."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.bind(address)
            listener.listen()
            # With a socket of ours: by default torch listens on all interfaces, and the store has no authentication.
            # The store closes the descriptor.
            return TCPStore(
                host,
                listener.getsockname()[1],
                world_size,
                is_master=True,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
    except (RuntimeError, ValueError, OSError) as error:
        raise GroupFailed(f"no store could be opened at {host}: {error}") from error


def join_store(host: str, port: int, world_size: int, timeout_s: float) -> TCPStore:
    """Connect to rank 0's store. Raises GroupFailed."""
    # A rank 0 that was formed by torch's own rendezvous waits for its workers, and counts only those that wait.
    try:
        return TCPStore(
            host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=True
        )
    except (RuntimeError, ValueError) as error:
        raise GroupFailed(f"no store at {host}:{port} within {timeout_s} s: {error}") from error


def form_group(
    store: TCPStore, *, name: str, rank: int, world_size: int, backend: str, timeout_s: float
) -> WeightGroup:
    """Form a group, waiting for all ranks for at most `timeout_s`. Raises GroupFailed.

    The calls and prefixes are those of SGLang's function (a prefix store with the group's name under torch's helper),
    so that SGLang engines can join."""
    choose_interface(store.host)
    if backend == "nccl":
        # Torch reads this when the group is made. Without it, `wait` returns when the transfer is queued on the device,
        # and a transfer that hangs or fails raises no error.
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=GroupName(name),
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise GroupFailed(f"group {name} was not formed within {timeout_s} s: {error}") from error
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return WeightGroup(name=name, rank=rank, world_size=world_size, backend=backend, group=group, store=store)


def choose_interface(host: str) -> None:
    """Set the interface that gloo reads from the environment when it forms a group. The choice for a local store is
    removed for a remote one; any other value was set by the user and is not changed."""
    if host in ("127.0.0.1", "localhost"):
        # By default gloo binds to the address of the machine's name, which may not exist.
        os.environ.setdefault(INTERFACE_VARIABLE, "lo")
    elif os.environ.get(INTERFACE_VARIABLE) == "lo":
        del os.environ[INTERFACE_VARIABLE]


def start_broadcast(group: WeightGroup, tensor: Tensor) -> dist.Work:
    """Begin a broadcast from rank 0. Raises GroupFailed."""
    try:
        work: dist.Work = dist.broadcast(tensor, src=0, group=group.group, async_op=True)
    except (RuntimeError, ValueError) as error:
        raise GroupFailed(f"broadcast in group {group.name} did not start: {error}") from error
    return work


def finish_broadcast(group: WeightGroup, work: dist.Work) -> None:
    """Wait for a broadcast, for at most the group's timeout. Raises GroupFailed."""
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupFailed(f"broadcast in group {group.name} failed: {error}") from error


def destroy_group(group: WeightGroup) -> None:
    """Leave the group. Raises GroupFailed if it was not torn down cleanly, as happens with a failed group."""
    try:
        dist.destroy_process_group(group.group)
    except (RuntimeError, ValueError) as error:
        raise GroupFailed(f"group {group.name} was not torn down cleanly: {error}") from error
