"""The command `headrace data convert`, which converts public data sets to headrace tasks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.actors.cli.output import EXIT_BAD_INPUT, Json, say, write_json

data_app = typer.Typer(no_args_is_help=True, help="Convert data sets.")

SHOWN = 5

Source = Annotated[Path, typer.Argument(metavar="SRC", help="JSONL file of the data set, or folder of task folders.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tasks.jsonl and refused.jsonl.")]


@data_app.command("convert")
def convert(
    source: Source,
    out: Out,
    form: Annotated[
        str,
        typer.Option(
            help="Format: swe (rows of SWE-bench and SWE-Gym, rows with metadata), tau (tau-bench, tau2-bench: "
            "retail), harbor (task folders), or a format from another package."
        ),
    ] = "swe",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting that the rows do not contain, as name=value, e.g. workdir=/testbed."),
    ] = None,
    json: Json = None,
) -> None:
    """Convert the rows of a data set to tasks (docs/tasks.md), and list the rows that cannot be graded, with the
    reasons."""
    from headrace.actors.errors import ConfigError
    from headrace.buffer.datasets.converters import SettingsRefused
    from headrace.buffer.datasets.converters import convert as converted
    from headrace.buffer.primitives.registry import PartRefused

    given: dict[str, Any] = {}
    for pair in settings or ():
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--set takes name=value, not {pair!r}")
        given[name] = value
    try:
        done = converted(source, out, form=form, settings=given)
    except (PartRefused, SettingsRefused) as error:
        raise ConfigError(f"--form {form}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or source}: {error.strerror}") from error
    if json is not None:
        write_json({"tasks": str(done.tasks), "count": done.count, "refused": list(map(asdict, done.refusals))}, json)
    say(f"{done.count} tasks in {done.tasks}, {len(done.refusals)} rows refused")
    for refusal in done.refusals[:SHOWN]:
        say(f"  line {refusal.line}: {refusal.reason}")
    if done.count == 0:
        raise typer.Exit(EXIT_BAD_INPUT)
