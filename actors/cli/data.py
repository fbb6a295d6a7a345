"""The commands `headrace data convert`, `data images` and `data check`: data sets become tasks, and tasks are tried."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.actors.cli.output import Json, Quiet, Steadily, say, write_json
from headrace.actors.run.exit_codes import EXIT_BAD_INPUT, EXIT_DIRTY, EXIT_FAILED

data_app = typer.Typer(no_args_is_help=True, help="Convert data sets, and try their tasks.")

SHOWN = 10

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC", help="JSONL, JSON or Parquet file of the data set, or folder or tar of task folders."
    ),
]
Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Folder for tasks.jsonl, refused.jsonl and report.json.")
]


@data_app.command("convert")
def convert(
    source: Source,
    out: Out,
    form: Annotated[
        str,
        typer.Option(
            help="Format: auto (by the first rows), swe (SWE-bench, SWE-Gym, rows with metadata), openclaw, tau and "
            "tau2 (retail), search-r1 (also NQ-open), harbor (task folders), endless, or a format from another package."
        ),
    ] = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting that the rows do not contain, as name=value, e.g. workdir=/testbed."),
    ] = None,
    licence: Annotated[
        str, typer.Option(help="Licence of the data, for report.json and the tasks; by default the file that names it.")
    ] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a row is refused.")] = False,
    json: Json = None,
) -> None:
    """Convert the rows of a data set to tasks (guide 'Task files'), and list the rows that cannot be graded, with the
    reasons."""
    from headrace.actors.errors import ConfigError
    from headrace.buffer.primitives.registry import PartRefused
    from headrace.buffer.tasks.datasets.converters import SettingsRefused, form_of
    from headrace.buffer.tasks.datasets.converters import convert as converted

    given: dict[str, Any] = {}
    for pair in settings or ():
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--set takes name=value, not {pair!r}")
        given[name] = value
    found = form
    try:
        found = form_of(source, form)
        done = converted(source, out, form=found, settings=given, licence=licence)
    except (PartRefused, SettingsRefused) as error:
        raise ConfigError(f"--form {found}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{error.filename or source}: {error.strerror}") from error
    if json is not None:
        refused, report = done.refusals, done.to_json()
        write_json({"tasks": str(done.tasks), "count": done.count, "refused": refused, "report": report}, json)
    if found != form:
        say(f"the rows have the form {found}")
    say(f"{done.count + done.refused} read, {done.count} converted to {done.tasks}, {done.refused} refused")
    for reason, count in list(done.reasons.items())[:SHOWN]:
        say(f"  {count} x {reason}")
    if done.refused:
        say(f"  every refused row: {done.tasks.parent / 'refused.jsonl'}")
    say(f"licence: {done.licence}")
    if done.count == 0:
        raise typer.Exit(EXIT_BAD_INPUT)
    if strict and done.refused:
        raise typer.Exit(EXIT_FAILED)


@data_app.command("images")
def images(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A task folder of Harbor's, or a folder of them.")],
    base: Annotated[
        list[str] | None,
        typer.Option(help="Our image for a name in FROM, as name=image, e.g. ubuntu:22.04=host; may be repeated."),
    ] = None,
    build_network: Annotated[str, typer.Option(help="Network of RUN: none, or host for this host's own.")] = "none",
    image_folder: Annotated[
        Path | None, typer.Option(help="Folder for images (sandbox.local.image_folder); by default the user's cache.")
    ] = None,
) -> None:
    """Build the images of Harbor's task folders, for tasks that `data convert` makes with --set built=true."""
    from headrace.actors.cli.held_out.harbor_images import build_images
    from headrace.actors.errors import ConfigError
    from headrace.buffer.tasks.datasets.harbor import task_folders
    from headrace.sandboxes.base import Network
    from headrace.sandboxes.images.builder import ImageBuilder
    from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

    bases = {}
    for pair in base or ():
        name, equals, value = pair.partition("=")
        if not name or not equals or not value:
            raise typer.BadParameter(f"--base takes name=image, not {pair!r}")
        bases[name] = value
    if build_network not in (Network.NONE, Network.HOST):
        raise typer.BadParameter(f"--build-network takes none or host, not {build_network!r}")
    try:
        folders = task_folders(source)
    except OSError as error:
        raise ConfigError(f"{error.filename or source}: {error.strerror}") from error

    async def build() -> int:
        allow = build_network == Network.HOST
        problems = 0
        async with LocalProvider(LocalSandboxConfig(image_folder=image_folder, allow_host_network=allow)) as provider:
            builder = ImageBuilder(provider, network=Network(build_network))
            async for one in build_images(folders, bases, builder):
                problems += bool(one.problem)
                how = one.problem or ("has no Dockerfile" if not one.name else f"image:{one.name}")
                took = "" if not one.seconds else f" ({one.seconds:.1f} s)"
                say(f"{one.folder.name}: {how}{' (was there)' if one.was_there else took}")
        return problems

    if asyncio.run(build()):
        raise typer.Exit(EXIT_BAD_INPUT)


@data_app.command("check")
def check(
    tasks: Annotated[Path, typer.Argument(metavar="TASKS", help="JSONL file of tasks.")],
    gold: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of solutions: task folders of Harbor, or ID.sh and ID.patch."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Check only the first N tasks.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for checked.jsonl; by default that of the tasks.")
    ] = None,
    json: Json = None,
    quiet: Quiet = False,
) -> None:
    """Grade every task in local sandboxes: untouched files must be graded and must not solve it, and a known solution
    must. Tasks that keep this are written to checked.jsonl; exit code 3 if one does not."""
    from headrace.actors.cli.held_out.task_check import check_tasks
    from headrace.actors.cli.held_out.task_solutions import Solutions, SolutionsRefused
    from headrace.actors.errors import ConfigError
    from headrace.buffer.tasks.task import load_tasks, write_tasks

    loaded = load_tasks(tasks)[:limit]
    try:
        solutions = Solutions(gold)
    except SolutionsRefused as error:
        raise ConfigError(f"--gold: {error}") from error
    found = asyncio.run(check_tasks(loaded, solutions, progress=None if quiet else Steadily("tasks checked")))
    kept = {checked.task_id for checked in found if checked.fault is None}
    path = (out or tasks.parent) / "checked.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tasks(path, [task for task in loaded if task.id in kept])
    write_json({"tasks": str(path), "kept": len(kept), "checked": found}, json)
    for checked in found:
        if checked.fault is not None:
            say(f"  {checked.task_id}: {checked.fault}")
    solved = sum(checked.gold is not None for checked in found)
    untried = sum(checked.untouched is None and checked.fault is None for checked in found)
    refused = len(found) - len(kept)
    say(f"{len(found)} checked, {solved} of them with a solution; {len(kept)} kept in {path}, {refused} not")
    if untried:
        say(f"{untried} tasks need an episode to be graded, so they were kept untried: headrace check RECIPE --task ID")
    if len(kept) < len(found):
        raise typer.Exit(EXIT_DIRTY)
