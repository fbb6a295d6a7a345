"""`headrace check`: one rollout of a recipe, in full."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from headrace.actors.cli.output import Json, Quiet, say, write_json

Recipe = Annotated[Path, typer.Argument(help="TOML file, e.g. scripts/recipes/quickstart.toml.")]
Out = Annotated[Path | None, typer.Option(help="Folder to keep what it leaves in; nothing is kept when left out.")]


def check(
    recipe: Recipe,
    task: Annotated[str, typer.Option(metavar="ID|N", help="Id of a task, or number of a training task.")] = "1",
    out: Out = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="table.key=value, may be repeated.")] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Run one rollout of one task, and tell its text, what of it is trained, the verdict and where the time went."""
    from headrace.actors.held_out.check import prepare_check, read_check
    from headrace.actors.held_out.command import drive_evaluation

    with tempfile.TemporaryDirectory(prefix="headrace-check-") if out is None else nullcontext(out) as folder:
        evaluation = prepare_check(recipe, task, overrides or (), Path(folder).resolve())
        drive_evaluation(evaluation, quiet=quiet)
        checked = read_check(evaluation)
    if json is not None:
        write_json(checked.to_json(), json)
    say(*checked.lines())
