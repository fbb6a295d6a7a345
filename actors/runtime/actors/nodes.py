"""Nodes of a Ray cluster: their roles, bundles of resources, and the agent that acts on a node for others.

Invariants:
- A process is named by its node, its id and its start time. The agent of its node kills it by signal, since a stopped
  process does not react to Ray; a process id that another process has taken over meanwhile is not killed.
- A bundle is one placement group with one bundle, whose actors run on one node and move together.
- Every wait for a node is bounded: a lost node answers nothing.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

import psutil

from headrace.actors.record.copies.pages import NodePage, ReceivedFile
from headrace.actors.record.copies.sender import next_page
from headrace.sandboxes.linux.processes import parse_stat

ROLE_LABEL: Final = "headrace/role"
"""Label of a node with its role, for `ray start --labels`."""
NODE_LABEL: Final = "ray.io/node-id"
"""Label that Ray gives each node, with its id."""
NAMESPACE: Final = "headrace"
"""Ray namespace of the actors that belong to a cluster and not to one run."""
TABLE_FILE: Final = "runs.db"
"""File of the table of runs, on the disk of the control node."""
RUN_FOLDER: Final = re.compile(r"[0-9a-f]{32}")
"""Name of a run's folder: its id."""
AGENT_TIMEOUT_S: Final = 15.0
"""Time limit for a node's agent to answer."""


class NodeRole(StrEnum):
    """Purpose of a node."""

    CONTROL = "control"
    """Has the ledger and the actors that decide: service, replay, dispatcher, pool, engine group."""
    ROLLOUT = "rollout"
    """Has workers, evaluators and gateways."""
    ENGINE = "engine"
    """Has inference engines."""
    LEARNER = "learner"
    """Has the learner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Resources that a set of actors shares on one node with this role."""

    role: NodeRole
    cpus: float
    gpus: float = 0.0
    memory_bytes: int = 0

    def described(self) -> str:
        parts = {"CPU": self.cpus, "GPU": self.gpus, "MiB of memory": self.memory_bytes >> 20}
        return ", ".join(f"{number:g} {unit}" for unit, number in parts.items() if number)

    def group(self, name: str, label: str) -> Any:
        """Return the placement group of this name, which is created if there is none. Blocks."""
        from ray.util import get_placement_group, placement_group

        with suppress(ValueError):
            return get_placement_group(name)
        amounts = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory_bytes}
        bundle = {resource: amount for resource, amount in amounts.items() if amount}
        return placement_group(
            [bundle], name=name, lifetime="detached", bundle_label_selector=[{ROLE_LABEL: label}], strategy="PACK"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProcess:
    """A process of a node; `started` is its start time in clock ticks since the node booted."""

    node: str
    id: int
    started: int


def this_process() -> NodeProcess:
    """Return this process. Its node is empty outside Ray."""
    import ray

    node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    return NodeProcess(node=node, id=os.getpid(), started=_own_start(os.getpid()))


@cache
def _own_start(process_id: int) -> int:
    return started(process_id)


def this_node() -> str:
    """Return the Ray id of this node; empty in a process that does not use Ray."""
    return this_process().node if "ray" in sys.modules else ""


def started(process_id: int) -> int:
    """Return the start time of a process of this node, in clock ticks since boot. Raises ProcessLookupError."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError as error:
        raise ProcessLookupError(f"no process {process_id}") from error
    return parse_stat(text).started


def kill_here(process: NodeProcess) -> bool:
    """Kill a process of this node by signal. Return False if it has ended."""
    try:
        # The descriptor keeps naming the process that is compared, whoever gets its id next.
        descriptor = os.pidfd_open(process.id)
    except ProcessLookupError:
        return False
    try:
        if started(process.id) != process.started:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def agent_name(node: str) -> str:
    """Return the actor name of a node's agent."""
    return f"node-{node}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """Disk of a folder, and memory of a node, in bytes."""

    node: str
    address: str
    free_disk_bytes: int
    free_memory_bytes: int
    memory_bytes: int


class NodeAgent:
    """Actor of one node that acts there for the actors of other nodes. `state` is the folder of the runs' files on this
    node's disk."""

    def __init__(self, state: Path) -> None:
        self._state = state
        # A page must not be read while its folder is being removed: files would seem to have made room for others.
        self._removing = threading.Lock()

    async def kill(self, process: NodeProcess) -> bool:
        """Kill a process of this node. Return False if it has ended."""
        return kill_here(process)

    async def report(self) -> NodeReport:
        import ray.util

        memory = psutil.virtual_memory()
        self._state.mkdir(parents=True, exist_ok=True)
        return NodeReport(
            node=this_process().node,
            address=ray.util.get_node_ip_address(),
            free_disk_bytes=shutil.disk_usage(self._state).free,
            free_memory_bytes=memory.available,
            memory_bytes=memory.total,
        )

    async def file_pages(self, held: Mapping[str, Mapping[str, ReceivedFile]], limit_bytes: int) -> dict[str, NodePage]:
        """Return the next page of the files of runs on this node's disk, for a receiver that has these of each run, of
        at most `limit_bytes` in all. Runs without a folder here are left out. Raises OSError."""
        return await asyncio.to_thread(self._file_pages, held, limit_bytes)

    def _file_pages(self, held: Mapping[str, Mapping[str, ReceivedFile]], limit_bytes: int) -> dict[str, NodePage]:
        with self._removing:
            runs = [run for run in self._folders() if run in held]
            # Each has its share, so that none waits for the files of another.
            share_bytes = limit_bytes // max(1, len(runs))
            return {run: next_page(self._state / run, held[run], limit_bytes=share_bytes) for run in runs}

    async def folders(self) -> tuple[str, ...]:
        """Return the names of the folders of runs on this node's disk; none where the table of runs is, since there
        they have the ledgers."""
        return await asyncio.to_thread(self._folders)

    def _folders(self) -> tuple[str, ...]:
        if not self._state.is_dir() or (self._state / TABLE_FILE).exists():
            return ()
        return tuple(sorted(path.name for path in self._state.iterdir() if RUN_FOLDER.fullmatch(path.name)))

    async def remove(self, folder: str, keep: tuple[str, ...] = ()) -> None:
        """Remove a folder of a run's files, except what it has of the names in `keep`. Idempotent. Raises ValueError
        for a folder that is not in `folders`."""
        await asyncio.to_thread(self._remove, folder, keep)

    def _remove(self, folder: str, keep: tuple[str, ...]) -> None:
        with self._removing:
            if folder not in self._folders():
                if RUN_FOLDER.fullmatch(folder) and not (self._state / folder).exists():
                    return
                raise ValueError(f"{folder!r} is not the folder of a run in {self._state} that this node may remove")
            for path in (self._state / folder).iterdir():
                if path.name in keep:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
            if not keep:
                shutil.rmtree(self._state / folder, ignore_errors=True)
