"""The commands `headrace tasks parked` and `unpark`, which list and release tasks that a run no longer issues.

Invariant: `parked` only reads, and works on live runs; `unpark` holds the run's lock and records every release in the
ledger's journal.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from headrace.actors.cli.ledger import Run, idle_store
from headrace.actors.cli.output import Json, say, show, write_json
from headrace.buffer.core.outages import utc

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
        table.add_row(task.task_id, utc(task.parked_at_s), ", ".join(task.hosts) or "-", task.last_failure)
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
