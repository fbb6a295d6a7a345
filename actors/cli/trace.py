"""The commands `headrace trace ...`, which tell where the time of rollouts went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.actors.cli.output import Json, write_json

trace_app = typer.Typer(no_args_is_help=True, help="Tell where the time of rollouts went, and why some were slow.")
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")]


@trace_app.command()
def running(run_dir: RunPath, json: Json = None) -> None:
    """List the rollouts that have not ended, the oldest against its cohort first: in which part each is, and for how
    long. Of a killed run it lists what was interrupted, with the last known part."""
    from headrace.actors.run.launch import reopen
    from headrace.actors.slowness.in_flight import in_flight

    directory = reopen(run_dir)[1]
    rows = in_flight(directory, driven=directory.is_driven())
    if json is not None:
        write_json([row.to_json() for row in rows], json)
    else:
        for line in [row.line() for row in rows] or ["no rollout is running or was interrupted"]:
            typer.echo(line)
