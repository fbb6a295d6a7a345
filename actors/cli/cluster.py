"""Commands that only runs of a cluster have."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.actors.cli.output import Json  # noqa: TC001 - typer reads the annotations
from headrace.actors.cli.remote_runs import (
    Address,
    KeyPath,
    Owner,
    Url,
    drain_run,
    required_access,
    show_events,
    stop_run,
)

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
