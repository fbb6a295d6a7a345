"""Commands that only runs of a cluster have."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import orjson
import typer
from rich.table import Table

from headrace.actors.cli.cluster_access import ClusterOptions, on_cluster, run_id_of
from headrace.actors.cli.output import Json, say, show, write_json
from headrace.actors.cli.remote_runs import show_change
from headrace.actors.cluster.runs.contract import RunsApi
from headrace.actors.errors import ConfigError
from headrace.actors.runtime.actors.nodes import this_node

if TYPE_CHECKING:
    from headrace.actors.cluster.runs.contract import NodeDrained, RunsClient

node_app = typer.Typer(no_args_is_help=True, help="Show and drain the nodes of a cluster.")
Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, or its name.")]
HERE: Final = "self"
"""Name of the node on which the command runs."""

on_nodes = partial(on_cluster, leave_out=("owner",))


@on_cluster
def drain(run: Run, cluster: ClusterOptions, json: Json = None) -> None:
    """Let a run on a cluster save a checkpoint and end; it can be resumed."""
    show_change(cluster.call_on(RunsApi.drain, run), json)


@on_cluster
def stop(run: Run, cluster: ClusterOptions, json: Json = None) -> None:
    """End a run on a cluster at once; it can be resumed from its last checkpoint."""
    show_change(cluster.call_on(RunsApi.stop, run), json)


@on_cluster
def upgrade(run: Run, cluster: ClusterOptions, json: Json = None) -> None:
    """Let a live run on a cluster save a checkpoint, end, and start again under the headrace that is installed there
    now, in a new epoch. No step is undone. Returns at once; `headrace events RUN` shows when it runs again."""
    show_change(cluster.call_on(RunsApi.upgrade, run), json)


@on_cluster
def events(
    run: Run,
    cluster: ClusterOptions,
    after: Annotated[int, typer.Option(min=0, help="Leave out the events up to this number.")] = 0,
) -> None:
    """Print the events of a run on a cluster, one JSON object a line, until it has ended."""

    async def print_all(client: RunsClient) -> None:
        async for event in client.events(await run_id_of(client, run), after=after):
            typer.echo(orjson.dumps(event))

    cluster.ask(print_all)


@node_app.command("list")
@on_nodes
def list_nodes(cluster: ClusterOptions, json: Json = None) -> None:
    """List the nodes of a cluster: role, free disk and memory as the node's agent reports them, and the runs with
    actors there. With --url, it needs a key of an admin."""
    nodes = cluster.call(RunsApi.nodes)
    if write_json(nodes, json):
        return
    table = Table("address", "role", "cpus", "gpus", "free disk", "free memory", "runs", "node", box=None)
    for node in nodes:
        free = (_mebibytes(node.free_disk_bytes), _mebibytes(node.free_memory_bytes))
        runs = " ".join(node.runs) or "-"
        table.add_row(node.address, node.role or "-", f"{node.cpus:g}", f"{node.gpus:g}", *free, runs, node.node)
    show(table)


@node_app.command("drain")
@on_nodes
def drain_node(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Address or Ray id of the node; `self` for this one.")],
    cluster: ClusterOptions,
    deadline_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds after which rollouts are issued elsewhere.")
    ] = 60.0,
    json: Json = None,
) -> None:
    """Let all runs leave a node before it ends, for example in a preStop hook: its workers get no new orders, its
    engines are replaced on other nodes, and a learner there saves a checkpoint. Returns once no rollout runs there;
    those that have not ended by the deadline are issued elsewhere. With --url, it needs a key of an admin."""
    if node == HERE and cluster.address is None:
        raise ConfigError("`self` needs --address: over --url, name the node by its address or its Ray id")

    async def leave(client: RunsClient) -> NodeDrained:
        # Ray knows this node only while it is connected.
        return await client.ask(RunsApi.drain_node, this_node() if node == HERE else node, deadline_s)

    drained = cluster.ask(leave)
    write_json(drained, json)
    for run_id, left in drained.runs.items():
        say(f"run {run_id}: {left.line()}")
    say(f"node {drained.address} can end")


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count >> 20} MiB"
