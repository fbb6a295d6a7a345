"""Process groups for weight transfer, formed as SGLang's `init_custom_process_group` does.

Invariants:
- A group is never the default group: it has a TCP store of its own at rank 0, on a free port, under the group's name
  as prefix. The store listens on the address that its members are given, and on no other.
- The group's timeout bounds its formation and every transfer; after any failure the group is discarded, never reused.
- `finish_broadcast` returns when the bytes have gone or come, whatever the backend.

Every function here blocks: call them from a thread of your own.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack
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
    """One formed group. `store` is kept alive with it: at rank 0 it is the server."""

    name: str
    rank: int
    world_size: int
    backend: str
    group: dist.ProcessGroup
    store: Store


def host_store(host: str, world_size: int, timeout_s: float) -> TCPStore:
    """Rank 0's store on a free port (`store.port`) of the address `host`. Raises GroupFailed."""
    try:
        listener = _listen(host)
        # Left alone, torch listens on all interfaces, and the store asks for no credential. It closes the descriptor.
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


def _listen(host: str) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family, kind, protocol))
        listener.bind(address)
        listener.listen()
        stack.pop_all()
    return listener


def join_store(host: str, port: int, world_size: int, timeout_s: float) -> TCPStore:
    """The client end of rank 0's store. Raises GroupFailed."""
    # A rank 0 formed by torch's own rendezvous counts its workers: only a worker that waits is counted.
    try:
        return TCPStore(
            host, port, world_size, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=True
        )
    except (RuntimeError, ValueError) as error:
        raise GroupFailed(f"no store at {host}:{port} within {timeout_s} s: {error}") from error


def form_group(
    store: TCPStore, *, name: str, rank: int, world_size: int, backend: str, timeout_s: float
) -> WeightGroup:
    """Blocks until all ranks are there, at most `timeout_s`. Raises GroupFailed.

    The calls and prefixes are those of SGLang's function (a prefix store of the group's name under torch's own helper),
    which is what lets an SGLang engine meet us."""
    choose_interface(store.host)
    if backend == "nccl":
        # Read where the group is made. Otherwise waiting ends when the transfer is queued on the device, and one that
        # hangs or fails is nobody's error.
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
    """Gloo reads its interface from the environment when it forms a group: what was chosen for a store on this machine
    must not stay for the next one elsewhere. Any other interface is a user's choice, and stays."""
    if host in ("127.0.0.1", "localhost"):
        # Gloo otherwise binds to whatever the machine's own name resolves to, which may be nothing.
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
    """Wait for a broadcast, at most the group's timeout. Raises GroupFailed."""
    try:
        work.wait()
    except RuntimeError as error:
        raise GroupFailed(f"broadcast in group {group.name} failed: {error}") from error


def destroy_group(group: WeightGroup) -> None:
    """Leave the group. What a broken group says while it is torn down is of no use to anybody."""
    try:
        dist.destroy_process_group(group.group)
    except (RuntimeError, ValueError) as error:
        raise GroupFailed(f"group {group.name} was not torn down cleanly: {error}") from error
