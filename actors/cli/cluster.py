"""Commands that only runs of a cluster have."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.actors.cli.output import Json
from headrace.actors.cli.remote_nodes import leave_node, show_nodes
from headrace.actors.cli.remote_runs import (
    Address,
    KeyPath,
    Owner,
    Url,
    drain_run,
    required_access,
    show_events,
    stop_run,
    upgrade_run,
)

node_app = typer.Typer(no_args_is_help=True, help="Show and drain the nodes of a cluster.")
Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, or its name.")]


def drain(
    run: Run, address: Address = None, owner: Owner = "", url: Url = None, key_file: KeyPath = None, json: Json = None
) -> None:
    """Let a run on a cluster save a checkpoint and end; it can be resumed."""
    drain_run(required_access(url, key_file, address, owner), run, json=json)


def stop(
    run: Run, address: Address = None, owner: Owner = "", url: Url = None, key_file: KeyPath = None, json: Json = None
) -> None:
    """End a run on a cluster at once; it can be resumed from its last checkpoint."""
    stop_run(required_access(url, key_file, address, owner), run, json=json)


def upgrade(
    run: Run, address: Address = None, owner: Owner = "", url: Url = None, key_file: KeyPath = None, json: Json = None
) -> None:
    """Let a live run on a cluster save a checkpoint, end, and start again under the headrace that is installed there
    now, in a new epoch. No step is undone. Returns at once; `headrace events RUN` shows when it runs again."""
    upgrade_run(required_access(url, key_file, address, owner), run, json=json)


def list_nodes(address: Address = None, url: Url = None, key_file: KeyPath = None, json: Json = None) -> None:
    """List the nodes of a cluster: role, free disk and memory as the node's agent reports them, and the runs with
    actors there. With --url, it needs a key of an admin."""
    show_nodes(required_access(url, key_file, address, ""), json=json)


def drain_node(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Address or Ray id of the node; `self` for this one.")],
    deadline_s: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds after which rollouts are issued elsewhere.")
    ] = 60.0,
    address: Address = None,
    url: Url = None,
    key_file: KeyPath = None,
    json: Json = None,
) -> None:
    """Let all runs leave a node before it ends, for example in a preStop hook: its workers get no new orders, its
    engines are replaced on other nodes, and a learner there saves a checkpoint. Returns once no rollout runs there;
    those that have not ended by the deadline are issued elsewhere. With --url, it needs a key of an admin."""
    leave_node(required_access(url, key_file, address, ""), node, deadline_s=deadline_s, json=json)


def events(
    run: Run,
    after: Annotated[int, typer.Option(min=0, help="Leave out the events up to this number.")] = 0,
    address: Address = None,
    owner: Owner = "",
    url: Url = None,
    key_file: KeyPath = None,
) -> None:
    """Print the events of a run on a cluster, one JSON object a line, until it has ended."""
    show_events(required_access(url, key_file, address, owner), run, after=after)


node_app.command("list")(list_nodes)
node_app.command("drain")(drain_node)
