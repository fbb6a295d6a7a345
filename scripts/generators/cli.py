"""The page docs/cli.md: every command of `headrace`, `scripts/bench` and `scripts/soak` with its arguments, options and
help, and the usage lines of the other scripts."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, get_args

import typer
from benches import command as benches
from benches.long_runs import soak

from headrace.actors.cli.app import app
from headrace.actors.run import exit_codes

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "cli.md"
HEAD = """# Commands

This page is written by `scripts/generate cli` from the commands' own help and the scripts' headers. After
`scripts/quickstart` or `scripts/setup`, `headrace` is `.venv/bin/headrace`. Errors are one line on standard error;
`--verbose` anywhere on the command line adds the traceback. Every command has `--help`.

| page | about |
|---|---|
| [configuration.md](configuration.md) | keys of a recipe, for `--set table.key=value` |
| [run_directory.md](run_directory.md) | the files that a run writes |
| [evaluation.md](evaluation.md), [tasks.md](tasks.md) | `headrace eval`, `headrace data` |
| [reliability.md](reliability.md) | `headrace resume`, `--restarts`, `scripts/soak` |
| [simulate.md](simulate.md), [tuning.md](tuning.md), [stations.md](stations.md) | `simulate`, `tune`, `report` |
| [engines.md](engines.md), [sglang.md](sglang.md) | `headrace engine`, `headrace serve engine` |
| [gateway.md](gateway.md) | `headrace serve gateway` |
| [e2b.md](e2b.md), [remote.md](remote.md) | `headrace serve sandbox` |
| [services.md](services.md) | `headrace serve retriever` |
| [buffer.md](buffer.md) | `headrace ledger` |
"""
DEVELOPMENT = ("quickstart", "test", "check", "setup", "install", "generate")
OTHERS = ("gpu_check", "warm_start", "demo_e2b")


def _cell(text: str) -> str:
    """Return the text escaped for a table cell."""
    return " ".join(text.split()).replace("|", "\\|")


def _value(annotation: Any) -> str:
    """Return the placeholder of an option's value: the names of an enumeration, or a type."""
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "|".join(str(item.value) for item in annotation)
    [inner] = [item for item in get_args(annotation) or (annotation,) if item is not type(None)]
    if get_args(inner) or inner is not annotation:
        return _value(inner)
    return {int: "N", float: "X", str: "TEXT", Path: "PATH"}[inner]


def _option(parameter: Any) -> str:
    """Return one row of the table: names with value, default, help."""
    if parameter.param_type_name == "argument":
        names = parameter.metavar or parameter.name.upper()
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or _value(parameter.type_descriptor.annotation)}"
        names = ", ".join([*parameter.opts, *parameter.secondary_opts]) + value
    default = parameter.default
    default = default.value if isinstance(default, Enum) else default
    shown = "" if default is None or default is False or default in ("", ()) else f"`{default}`"
    shown = "required" if parameter.required else shown
    return f"| `{_cell(names)}` | {_cell(shown)} | {_cell(parameter.help or '')} |"


def command_lines(name: str, command: Any, level: str) -> list[str]:
    """Return the heading, the help and the parameters of a command; for a group, also those of its commands."""
    lines = [f"{level} {name}", "", " ".join((command.help or "").split()), ""]
    parameters = [item for item in command.params if item.name != "help" and not getattr(item, "hidden", False)]
    if parameters:
        lines += ["| argument or option | default | meaning |", "|---|---|---|", *map(_option, parameters), ""]
    for part in getattr(command, "commands", {}).values():
        lines += command_lines(f"{name} {part.name}", part, "###")
    return lines


def header_lines(script: str) -> list[str]:
    """Return heading, description and usage of a shell script from the comment at its top."""
    lines = (ROOT / "scripts" / script).read_text(encoding="utf-8").splitlines()[1:]
    comment = []
    for line in lines:
        if not line.startswith("#"):
            break
        comment.append(line.removeprefix("#").removeprefix(" "))
    about, _, usage = "\n".join(comment).partition("Usage: ")
    example = ["", "```", usage.strip(), "```"] if usage else []
    return [f"### scripts/{script}", "", " ".join(about.split()), *example, ""]


def render() -> dict[Path, str]:
    """Return the page by its path."""
    soaking = typer.Typer(add_completion=False)
    soaking.command()(soak.main)
    lines = [HEAD, *command_lines("headrace", typer.main.get_command(app), "##")]
    lines += ["## Exit codes", "", exit_codes.HELP, "", "## Scripts", ""]
    for script in DEVELOPMENT:
        lines += header_lines(script)
    lines += command_lines("scripts/bench", typer.main.get_command(benches.app), "##")
    lines += command_lines("scripts/soak", typer.main.get_command(soaking), "##")
    lines += ["## Other scripts", "", *[line for script in OTHERS for line in header_lines(script)]]
    return {PATH: "\n".join(lines)}
