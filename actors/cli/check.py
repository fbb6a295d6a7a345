"""`headrace check`: run one rollout of a recipe and print it in full."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headrace.actors.cli.output import Json, Quiet, say, write_json

Recipe = Annotated[Path, typer.Argument(help="TOML file, e.g. scripts/recipes/quickstart.toml.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the records of the rollout; by default nothing is kept.")]


def check(
    recipe: Recipe,
    task: Annotated[str, typer.Option(metavar="ID|N", help="Id of a task, or number of a training task from 1.")] = "1",
    out: Out = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override table.key=value; may be repeated.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run one rollout of one task, and print its text, the trained tokens, the verdict and the time of each phase."""
    from headrace.actors.held_out.check import prepare_check, read_check
    from headrace.actors.held_out.command import drive_evaluation

    with tempfile.TemporaryDirectory(prefix="headrace-check-") if out is None else nullcontext(out) as folder:
        evaluation = prepare_check(recipe, task, overrides or (), Path(folder).resolve())
        drive_evaluation(evaluation, quiet=quiet)
        checked = read_check(evaluation)
    if json is not None:
        write_json(checked.to_json(), json)
    say(*checked.lines())
