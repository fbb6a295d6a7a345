"""`headrace run --dry-run`: the resolved run, and the file that sets each key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from headrace.actors.cli.output import result_console, say, show, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def show_dry_run(recipe: Path, on: Sequence[Path], overrides: Sequence[str], *, json: Path | None) -> None:
    """Check a recipe and print every key of the run that no default sets. With `json`, write all keys. Raises
    ConfigError."""
    from headrace.actors.run.launch import dry_run
    from headrace.actors.run.overlays import DEFAULT, described

    checked = dry_run(recipe, on, overrides)
    keys = list(described(checked.config, checked.origins))
    table = Table(box=None, pad_edge=False)
    for column in ("key", "value", "set by"):
        table.add_column(column, overflow="fold")
    for key, value, origin in keys:
        if origin != DEFAULT:
            table.add_row(key, repr(value), origin)
    show(table, result_console())
    train, held_out = checked.tasks
    say(f"{len(keys)} keys, {train} training tasks, {held_out} held-out tasks: the recipe is valid")
    for deviation in getattr(checked.config.learner, "deviations", ()):
        say(f"learner: {deviation}")
    for reason in checked.absent:
        say(f"not on this machine: {reason}")
    if json is not None:
        document = {
            "keys": {key: {"value": value, "set_by": origin} for key, value, origin in keys},
            "tasks": {"train": train, "heldout": held_out},
            "not_on_this_machine": list(checked.absent),
        }
        write_json(document, json)
