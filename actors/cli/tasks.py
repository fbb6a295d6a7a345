"""`headrace tasks parked` and `unpark`: list and release tasks that a run no longer issues.

Invariant: `parked` only reads, and works on live runs; `unpark` holds the lock of the run and records every release in
the journal of the ledger.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from headrace.actors.cli.ledger import Run, idle_store
from headrace.actors.cli.output import EXIT_BAD_INPUT, Json, say, show, write_json
from headrace.actors.run.restarts import Restarting, RestartPolicy
from headrace.buffer.core.outages import utc

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from headrace.actors.record.run_directory import RunDirectory

AnyRun = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, which may be live.")]

tasks_app = typer.Typer(no_args_is_help=True, help="List and release the parked tasks of a run.")


@tasks_app.command()
def parked(run_dir: AnyRun, json: Json = None) -> None:
    """List tasks that are no longer issued: since when, on which hosts they failed, and the last failure."""
    from headrace.actors.run.launch import reopen
    from headrace.buffer.audit.condition import read_condition

    found = read_condition(reopen(run_dir)[1].path).parked
    if json is not None:
        write_json([asdict(task) for task in found], json)
        return
    if not found:
        say("no task is parked")
        return
    table = Table("task", "parked", "hosts", "last failure", box=None)
    for task in found:
        since = "-" if task.parked_at_s is None else utc(task.parked_at_s)
        table.add_row(task.task_id, since, ", ".join(task.hosts) or "-", task.last_failure)
    show(table)


@tasks_app.command()
def unpark(
    run_dir: Run,
    tasks: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help="Ids of parked tasks.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Release all parked tasks.")] = False,
    json: Json = None,
) -> None:
    """Issue parked tasks again from the next resume on, with a cleared failure record."""
    from headrace.actors.run.launch import reopen

    if bool(tasks) == every:
        raise typer.BadParameter("name the tasks to release, or give --all (`headrace tasks parked` lists them)")

    async def release() -> tuple[str, ...]:
        async with idle_store(*reopen(run_dir)) as store:
            return await store.operators.unpark(tasks or None)

    released = asyncio.run(release())
    if json is not None:
        write_json({"released": released}, json)
    say(f"{len(released)} tasks are released; continue with `headrace resume {run_dir}`")


Restarts = Annotated[
    int,
    typer.Option(min=0, metavar="N", help="Resume up to N times after transient failures (exit code 75, or killed)."),
]
HEADRACE = (sys.executable, "-c", "from headrace.actors.cli.app import main; main()")


class RunEnded(Exception):
    """A run failed after it had started."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def ending_a_run() -> Iterator[None]:
    """Mark errors of the block as failures of a started run. Raises RunEnded."""
    try:
        yield
    except Exception as error:
        raise RunEnded(error) from error


def resume_again_and_again(
    directory: RunDirectory, restarts: int, *, json: Path | None, quiet: bool, once: Sequence[str] = ()
) -> int:
    """Resume a run with up to `restarts` restarts and return the exit code. Only the first attempt gets the options in
    `once`."""
    command = [*HEADRACE, "resume", str(directory.path)]
    if json is not None:
        command += ["--json", str(json)]
    if quiet:
        command.append("--quiet")
    return Restarting(RestartPolicy(restarts), say).run([*command, *once], command)


data_app = typer.Typer(no_args_is_help=True, help="Convert data sets.")

SHOWN = 5

Source = Annotated[Path, typer.Argument(metavar="SRC", help="JSONL file of the data set.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for tasks.jsonl and refused.jsonl.")]


@data_app.command("convert")
def convert(
    source: Source,
    out: Out,
    form: Annotated[
        str, typer.Option(help="Row format: swe (SWE-bench, SWE-Gym, rows with metadata), or one of another package.")
    ] = "swe",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting name=value that rows do not contain, e.g. workdir=/testbed."),
    ] = None,
    json: Json = None,
) -> None:
    """Convert the rows of a data set to tasks (docs/tasks.md); list ungradable rows with the reason."""
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
