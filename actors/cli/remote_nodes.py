"""Commands for the nodes of a cluster, over its control API or over Ray on one of its nodes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from rich.table import Table

from headrace.actors.cli.output import say, show, write_json
from headrace.actors.cli.remote_runs import OnCluster
from headrace.actors.errors import ConfigError
from headrace.actors.runtime.actors.nodes import this_node

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.actors.cli.remote_runs import Access
    from headrace.actors.cluster.runs.client import RunsClient
    from headrace.actors.cluster.runs.contract import NodeDrained

HERE: Final = "self"
"""Name of the node on which the command runs."""


def show_nodes(api: Access, *, json: Path | None = None) -> None:
    """Show the nodes of the cluster."""
    nodes = api.ask(lambda client: client.nodes())
    if json is not None:
        write_json([asdict(node) for node in nodes], json)
        return
    table = Table("address", "role", "cpus", "gpus", "free disk", "free memory", "runs", "node", box=None)
    for node in nodes:
        free = (_mebibytes(node.free_disk_bytes), _mebibytes(node.free_memory_bytes))
        runs = " ".join(node.runs) or "-"
        table.add_row(node.address, node.role or "-", f"{node.cpus:g}", f"{node.gpus:g}", *free, runs, node.node)
    show(table)


def leave_node(api: Access, node: str, *, deadline_s: float, json: Path | None = None) -> None:
    """Let all runs leave a node. Raises ConfigError for `self` over HTTP."""
    if node == HERE and not isinstance(api, OnCluster):
        raise ConfigError("`self` needs --address: over --url, name the node by its address or its Ray id")

    async def leave(client: RunsClient) -> NodeDrained:
        return await client.drain_node(this_node() if node == HERE else node, deadline_s)

    drained = api.ask(leave)
    if json is not None:
        write_json(asdict(drained), json)
    for run_id, left in drained.runs.items():
        say(f"run {run_id}: {left.line()}")
    say(f"node {drained.address} can end")


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count >> 20} MiB"
