"""The command `headrace init`: a first recipe, of what the user chooses and cannot be derived."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from headrace.actors.cli.output import Json, say, write_json
from headrace.actors.errors import ConfigError

GENERATED, THIS_HOST = "generated", "this"
_MACHINES: Final = Path(__file__).resolve().parents[2] / "scripts" / "machines"
_HELD_OUT: Final = 10
"""One task of so many is held out where no file of held-out tasks is given."""


def init(
    recipe: Annotated[Path, typer.Argument(help="TOML file to write; it must not exist.")] = Path("recipe.toml"),
    model: Annotated[str, typer.Option(help="Hugging Face directory of the policy.")] = "",
    agent: Annotated[str, typer.Option(help="Kind of agent: shell, loop, claude-code, ..., or module:Class.")] = "",
    tasks: Annotated[
        str, typer.Option(help="JSONL file of training tasks, folder of Harbor tasks, or `generated`.")
    ] = "",
    heldout: Annotated[
        Path | None, typer.Option(help="JSONL file of held-out tasks; by default one task in ten is held out.")
    ] = None,
    machine: Annotated[
        str, typer.Option(help="Machine file: a path, the name of one of headrace's own, or `this` for this host.")
    ] = "",
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Key that the run is started with (table.key=value); repeatable.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Write a recipe for a model, an agent, tasks and a machine, and check it as `run --dry-run` does. Everything else
    is derived at each start, and printed here. Asks for what no option gives."""
    from headrace.actors.run.checks import check_memory
    from headrace.actors.run.launch import dry_run

    if recipe.suffix != ".toml":
        raise ConfigError(f"{recipe}: name a file that ends with .toml")
    if recipe.exists():
        raise ConfigError(f"{recipe} exists: name another file, or remove it")
    model = model or _asked("--model", "Directory of the model")
    agent = agent or _asked("--agent", "Agent (shell, loop, claude-code, codex, ...)", "shell")
    tasks = tasks or _asked("--tasks", "Tasks (JSONL file, folder of Harbor tasks, or generated)", GENERATED)
    machine = machine or _asked("--machine", "Machine (path, 8gpu, 64gpu, ..., or this for this host)", THIS_HOST)
    path = model if model.startswith("miniature:") else str(Path(model).resolve())
    settings = overrides or []
    on = () if machine == THIS_HOST else (_machine_file(machine),)
    folder = recipe.with_suffix("")
    if folder.exists() and tasks != GENERATED:
        raise ConfigError(f"{folder} exists: name another file, or remove it")
    if heldout is not None and tasks == GENERATED:
        raise ConfigError("--heldout has no effect with generated tasks; name a file of training tasks by --tasks")
    try:
        files = () if tasks == GENERATED else _task_files(Path(tasks), heldout, folder)
        tables = _tables(path, agent, files)
        recipe.write_text(tables, encoding="utf-8")
        checked = dry_run(recipe, on, settings)
        check_memory(checked.config)
        options = (*(f"--on {file}" for file in on), *(f"--set {shlex.quote(one)}" for one in settings))
        command = " ".join(["headrace run", str(recipe), *options])
        names = ", ".join(one.key for one in checked.derived)
        head = [command, *textwrap.wrap(f"Derived at the start: {names}", 116)]
        recipe.write_text("".join(f"# {line}\n" for line in head) + tables, encoding="utf-8")
    except BaseException as error:
        recipe.unlink(missing_ok=True)
        if tasks != GENERATED:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise ConfigError(f"{error.filename}: {error.strerror}; name another file") from error
        raise
    say(*(one.line for one in checked.derived))
    say(f"{checked.tasks[0]} training tasks, {checked.tasks[1]} held-out tasks")
    for reason in checked.absent:
        say(f"not on this machine: {reason}")
    say(f"{recipe} is valid; start it with: {command}")
    document = {"recipe": str(recipe), "command": command, "derived": checked.derived, "absent": checked.absent}
    write_json(document, json_file)


def _asked(option: str, question: str, default: str | None = None) -> str:
    if not sys.stdin.isatty():
        raise ConfigError(f"{option} is missing, and there is no terminal to ask for it: add {option} VALUE")
    return str(typer.prompt(question, default=default, err=True))


def _machine_file(machine: str) -> Path:
    known = {path.stem: path for path in sorted(_MACHINES.glob("*.toml"))}
    path = Path(machine) if Path(machine).is_file() else known.get(machine)
    if path is None:
        raise ConfigError(f"--machine {machine}: no such file; name one, or {', '.join(known)}, or {THIS_HOST}")
    return path


def _task_files(source: Path, heldout: Path | None, folder: Path) -> tuple[Path, Path]:
    """Return the files of training and held-out tasks. Harbor's folders are converted, and tasks without a held-out
    file are split, into files in `folder`."""
    from headrace.buffer.tasks.datasets.converters import convert
    from headrace.buffer.tasks.task import load_tasks, write_tasks

    if not source.exists():
        raise ConfigError(f"--tasks {source}: no such file or folder; name one, or {GENERATED}")
    if source.is_dir():
        done = convert(source, folder, form="harbor", settings={"built": True})
        if not done.count:
            reason = next(iter(done.reasons), "it has no task folders")
            raise ConfigError(f"--tasks {source}: no task can be used: {reason} (`headrace data convert` has settings)")
        say(f"{done.count} tasks converted, {done.refused} refused; build their images: headrace data images {source}")
        source = done.tasks
    if heldout is not None:
        return source, heldout
    found = load_tasks(source)
    if len(found) < 2:
        raise ConfigError(f"--tasks {source}: {len(found)} tasks, of which none can be held out; add --heldout")
    kept = found[::_HELD_OUT]
    folder.mkdir(exist_ok=True)
    files = folder / "train.jsonl", folder / "heldout.jsonl"
    write_tasks(files[0], [task for place, task in enumerate(found) if place % _HELD_OUT])
    write_tasks(files[1], kept)
    say(f"{len(kept)} of {len(found)} tasks are held out: {files[1]}")
    return files


def _tables(model: str, agent: str, files: Sequence[Path]) -> str:
    """Return the tables of the recipe. Time for graders follows from the tasks, which no start reads before it."""
    lines = ["", "[model]", f"path = {json.dumps(model)}", "", "[agent]", f"kind = {json.dumps(agent)}"]
    if files:
        from headrace.actors.evaluation.graders.repository import REPOSITORY_RUNS
        from headrace.buffer.tasks.task import load_tasks

        train, heldout = (json.dumps(str(file.resolve())) for file in files)
        lines += ["", "[tasks]", f"train = {train}", f"heldout = {heldout}"]
        evaluators = [task.evaluators for file in files for task in load_tasks(file)]
        longest_s = max(sum(getattr(one, "timeout_s", 0.0) for one in each) for each in evaluators)
        lines += ["", "[rollout]", f"evaluate_timeout_s = {max(90, math.ceil(REPOSITORY_RUNS * longest_s))}"]
    return "\n".join(lines) + "\n"
