"""`headrace data convert`: data sets of others as tasks of headrace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.actors.cli.output import EXIT_BAD_INPUT, Json, say, write_json

data_app = typer.Typer(no_args_is_help=True, help="Data sets of others.")

SHOWN = 5

Source = Annotated[Path, typer.Argument(metavar="SRC", help="JSONL file of the data set.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tasks.jsonl and refused.jsonl.")]


@data_app.command("convert")
def convert(
    source: Source,
    out: Out,
    form: Annotated[
        str, typer.Option(help="Form of the rows: swe (SWE-bench, SWE-Gym, rows with metadata), or of another package.")
    ] = "swe",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="name=value that rows do not say, e.g. workdir=/testbed.")
    ] = None,
    json: Json = None,
) -> None:
    """Write the rows of a data set as tasks (docs/tasks.md), and those that cannot be graded with the reason."""
    from headrace.actors.errors import ConfigError
    from headrace.buffer.datasets.converters import SettingsRefused
    from headrace.buffer.datasets.converters import convert as converted
    from headrace.buffer.primitives.registry import PartRefused

    try:
        done = converted(source, out, form=form, settings=_settings(settings or []))
    except (PartRefused, SettingsRefused) as error:
        raise ConfigError(f"--form {form}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or source}: {error.strerror}") from error
    if json is not None:
        write_json({"tasks": str(done.tasks), "count": done.count, "refused": list(map(asdict, done.refusals))}, json)
    say(f"{done.count} tasks in {done.tasks}, {len(done.refusals)} rows refused")
    for refusal in done.refusals[:SHOWN]:
        say(f"  line {refusal.line}: {refusal.reason}")
    if done.count == 0:
        raise typer.Exit(EXIT_BAD_INPUT)


def _settings(given: list[str]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--set takes name=value, not {pair!r}")
        settings[name] = value
    return settings
