"""Probe of all nodes of a cluster: what `checks` needs to know.

Invariants:
- The probe is pickled by value and imports nothing of headrace before it knows the version, so that it also runs where
  headrace is missing or differs.
- A node that does not answer in time is an error that names it.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from headrace.actors.cluster.nodes.checks import Node, NodeFacts, Versions
from headrace.actors.errors import ConfigError
from headrace.actors.runtime.actors.nodes import ROLE_LABEL
from headrace.actors.runtime.version import RUNNING

HEAD_RESOURCE: Final = "node:__internal_head__"
PROBE_TIMEOUT_S: Final = 60.0
"""Time limit for a node to answer: it starts a Python process for the first probe."""


async def living_nodes() -> tuple[Node, ...]:
    """Return the nodes that are alive. Raises ConfigError if the head does not answer."""
    import ray

    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            found = await asyncio.to_thread(ray.nodes)
    except TimeoutError as error:
        raise ConfigError("the head of the cluster does not answer: try again when it is back") from error
    return tuple(_node(entry) for entry in found if entry["Alive"])


def _node(entry: Mapping[str, Any]) -> Node:
    resources = entry["Resources"]
    return Node(
        node=entry["NodeID"],
        address=entry["NodeManagerAddress"],
        role=entry["Labels"].get(ROLE_LABEL, ""),
        cpus=resources.get("CPU", 0.0),
        gpus=resources.get("GPU", 0.0),
        memory_bytes=int(resources.get("memory", 0)),
        is_head=HEAD_RESOURCE in resources,
    )


def versions_here() -> Versions:
    import ray

    return Versions(ray=ray.__version__, headrace=RUNNING, python=".".join(map(str, sys.version_info[:3])))


@contextmanager
def marked(storage: Path) -> Iterator[tuple[Path, str]]:
    """Write a file with a new content to the storage for the duration of the block. Raises ConfigError."""
    path, content = storage / f".headrace-{uuid.uuid4().hex}", uuid.uuid4().hex
    try:
        storage.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    except OSError as error:
        raise ConfigError(f"cluster.storage {storage} cannot be written here: {error.strerror}") from error
    try:
        yield path, content
    finally:
        path.unlink(missing_ok=True)


async def probe(
    nodes: Sequence[Node], marker: Path, paths: Mapping[str, Sequence[str]], states: Mapping[str, str]
) -> list[NodeFacts]:
    """Probe all nodes at once. `paths` has the paths that must exist and `states` the state folder, by role. Raises
    ConfigError for a node that does not answer."""
    return await asyncio.gather(
        *(_probe_one(node, marker, paths.get(node.role, ()), states.get(node.role, "")) for node in nodes)
    )


async def open_redis(head: Node) -> str:
    """Return the address of the Redis that the head uses without a password, "" if it needs none or has one. Raises
    ConfigError if the head does not answer."""
    found = await _run_on(head, open_redis_function())
    return str(found)


async def _probe_one(node: Node, marker: Path, paths: Sequence[str], state: str) -> NodeFacts:
    asked_s = time.time()
    found = await _run_on(node, _probe_function(), str(marker), list(paths), state)
    offset_s = clock_offset_s(asked_s, time.time(), found.pop("time_s"))
    return NodeFacts(node=node, clock_s=offset_s, **found)


async def _run_on(node: Node, function: Callable[..., Any], *arguments: object) -> Any:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node.node, soft=False)
    task: Any = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(function)
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            return await task.remote(*arguments)
    except (TimeoutError, RayError) as error:
        reason = "no answer" if isinstance(error, TimeoutError) else " ".join(str(error).split())[-300:]
        raise ConfigError(f"{node.named} could not be probed within {PROBE_TIMEOUT_S:g} s: {reason}") from error


def clock_offset_s(asked_s: float, answered_s: float, there_s: float) -> float:
    """Return how far a node's clock is at least ahead (or behind, negative), given when it was asked and answered on
    this clock."""
    if there_s < asked_s:
        return there_s - asked_s
    return max(0.0, there_s - answered_s)


def open_redis_function() -> Callable[[], str]:
    """Return the function that looks for the head's process on its own node: the address of its Redis and the password
    for it, if there are any, are among its arguments."""

    def find_open_redis() -> str:
        from pathlib import Path

        import ray

        here = f"--node-ip-address={ray.util.get_node_ip_address()}"
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if words[0].endswith("gcs_server") and here in words:
                given = dict(word.removeprefix("--").partition("=")[::2] for word in words[1:])
                if given.get("redis_address") and not given.get("redis_password"):
                    return given["redis_address"]
        return ""

    return find_open_redis


def _probe_function() -> Callable[[str, list[str], str], dict[str, Any]]:
    def find_facts(marker: str, paths: list[str], state: str) -> dict[str, Any]:
        import os
        import platform
        import time
        from importlib import metadata
        from pathlib import Path

        import ray

        try:
            headrace_version = metadata.version("headrace")
        except metadata.PackageNotFoundError:
            headrace_version = ""
        state_problem = ""
        if state and headrace_version:
            from headrace.buffer.errors import LedgerRefused
            from headrace.buffer.ledger.local_disk import filesystem_magic, refuse_network

            try:
                Path(state).mkdir(parents=True, exist_ok=True)
                refuse_network(Path(state), filesystem_magic(Path(state)))
            except (OSError, LedgerRefused) as error:
                state_problem = f"cluster.state: {error}"
        found = Path(marker)
        return {
            "time_s": time.time(),
            "has_token_auth": os.environ.get("RAY_AUTH_MODE") == "token",
            "ray_version": ray.__version__,
            "headrace_version": headrace_version,
            "python_version": platform.python_version(),
            # By default Ray hides nothing from a process that has reserved none, as this one.
            "hides_gpus": os.environ.get("CUDA_VISIBLE_DEVICES") == "",
            "marker": found.read_text() if found.exists() else "",
            "missing": tuple(path for path in paths if not Path(path).exists()),
            "state_problem": state_problem,
        }

    return find_facts
