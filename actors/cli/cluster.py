"""Commands that only runs of a cluster have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.actors.cli.output import Json  # noqa: TC001 - typer reads the annotations
from headrace.actors.cli.remote_runs import Address, KeyPath, Owner, Url, access, drain_run, show_events, stop_run
from headrace.actors.errors import ConfigError

if TYPE_CHECKING:
    from headrace.actors.cli.remote_runs import Access

Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, or its name.")]


def drain(
    run: Run, address: Address = None, owner: Owner = "", url: Url = None, key_file: KeyPath = None, json: Json = None
) -> None:
    """Let a run on a cluster save a checkpoint and end; it can be resumed."""
    drain_run(_required(url, key_file, address, owner), run, json=json)


def stop(
    run: Run, address: Address = None, owner: Owner = "", url: Url = None, key_file: KeyPath = None, json: Json = None
) -> None:
    """End a run on a cluster at once; it can be resumed from its last checkpoint."""
    stop_run(_required(url, key_file, address, owner), run, json=json)


def events(
    run: Run,
    after: Annotated[int, typer.Option(min=0, help="Leave out the events up to this number.")] = 0,
    address: Address = None,
    owner: Owner = "",
    url: Url = None,
    key_file: KeyPath = None,
) -> None:
    """Print the events of a run on a cluster, one JSON object a line, until it has ended."""
    show_events(_required(url, key_file, address, owner), run, after=after)


def _required(url: str | None, key_file: Path | None, address: str | None, owner: str) -> Access:
    if (found := access(url, key_file, address, owner)) is None:
        raise ConfigError("this command is for runs of a cluster: name it with --address or --url")
    return found
