"""Commands that only runs of a cluster have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import typer

from headrace.actors.cli.cluster_access import ClusterOptions
from headrace.actors.cli.output import Json, say, with_records, write_json
from headrace.actors.cli.remote_runs import show_change
from headrace.actors.cluster.runs.contract import RunsApi
from headrace.actors.errors import ConfigError
from headrace.actors.runtime.actors.nodes import this_node

if TYPE_CHECKING:
    from headrace.actors.cluster.runs.contract import NodeDrained, RunsClient

node_app = typer.Typer(no_args_is_help=True, help="Let runs leave a node of a cluster.")
Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, or its name.")]
HERE: Final = "self"
"""Name of the node on which the command runs."""


@with_records
def stop(
    run: Run,
    cluster: ClusterOptions,
    now: Annotated[
        bool, typer.Option("--now", help="End at once: what is newer than the last checkpoint is done again.")
    ] = False,
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Start again under the headrace that is installed there now, in a new epoch."),
    ] = False,
    json: Json = None,
) -> None:
    """Let a run on a cluster save a checkpoint and end; it can be resumed. Returns at once; `headrace status RUN
    --events` shows when it has ended, or with --restart when it runs again."""
    if now and restart:
        raise ConfigError("--now and --restart: a run that starts again saves a checkpoint first; leave one out")
    change = RunsApi.stop if now else RunsApi.upgrade if restart else RunsApi.drain
    show_change(cluster.call_on(change, run), json)


@node_app.command("drain")
@with_records
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
