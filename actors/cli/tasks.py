"""`headrace tasks parked` and `unpark`: which tasks a run does not issue any more, and how they are released.

Invariant: `parked` only reads, also beside a run that is driven; `unpark` holds the run's lock, and every release is an
entry of the ledger's journal.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from headrace.actors.cli.ledger import Run, idle_store
from headrace.actors.cli.output import Json, say, show, write_json
from headrace.buffer.core.outages import utc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.actors.record.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig

AnyRun = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run; it may be driven.")]

tasks_app = typer.Typer(no_args_is_help=True, help="Tasks of a run.")


@tasks_app.command()
def parked(run_dir: AnyRun, json: Json = None) -> None:
    """List the tasks that are not issued any more: since when, on which hosts they failed, and the last failure."""
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
    every: Annotated[bool, typer.Option("--all", help="All that are parked.")] = False,
    json: Json = None,
) -> None:
    """Issue parked tasks again from the next resume on, with a clean record."""
    from headrace.actors.run.launch import reopen

    if bool(tasks) == every:
        raise typer.BadParameter("name the tasks to release, or give --all (`headrace tasks parked` lists them)")
    config, directory = reopen(run_dir)
    released = asyncio.run(_unpark(config, directory, tasks or None))
    if json is not None:
        write_json({"released": released}, json)
    say(f"{len(released)} tasks are released; go on with `headrace resume {run_dir}`")


async def _unpark(config: RunConfig, directory: RunDirectory, tasks: Sequence[str] | None) -> tuple[str, ...]:
    """All that are parked when `tasks` is None. Raises TaskNotParked, with nothing changed."""
    async with idle_store(config, directory) as store:
        return await store.operators.unpark(tasks)
