"""Common options and output functions shared by all commands."""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_origin, get_type_hints

import orjson
import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from headrace.actors.errors import ActorError, ConfigError, RunError
from headrace.buffer.errors import ReplayError, TaskFileError
from headrace.policies.errors import LearnerError, PolicyError
from headrace.sandboxes.errors import SandboxError
from headrace.serve.gateway.errors import ServeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from headrace.actors.engines.members_file import EngineStatus

Host: TypeAlias = Annotated[
    str, typer.Option(help="Address to bind; any address other than loopback requires --key-file.")
]
Port: TypeAlias = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")]
IdleSeconds: TypeAlias = Annotated[float, typer.Option(min=0.1, help="Seconds without a request after which it ends.")]
KeyFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Private file with the key that each request must carry.")
]


EVERY_S = 5.0
_PIPE_COLUMNS = 1000

Json = Annotated[
    Path | None, typer.Option("--json", help="Write the result as JSON to this file ('-' is standard output).")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no live progress.")]


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, in place of each record among its parameters, the record's annotated fields as options."""
    own = inspect.signature(command, eval_str=True).parameters
    records: dict[str, Any] = {name: one.annotation for name, one in own.items() if is_dataclass(one.annotation)}
    parameters = [one.replace(kind=one.KEYWORD_ONLY) for name, one in own.items() if name not in records]
    options: dict[str, dict[str, str]] = {name: {} for name in records}
    for name, record in records.items():
        hints = get_type_hints(record, include_extras=True)
        for field in fields(record):
            if get_origin(hint := hints[field.name]) is Annotated:
                # A command may have a parameter of the same name, such as the URL of an engine.
                option = f"{name}_{field.name}" if field.name in own else field.name
                options[name][field.name] = option
                default = inspect.Parameter.empty if field.default is MISSING else field.default
                parameters.append(
                    inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
                )

    @wraps(command)
    def with_options(**given: Any) -> None:
        for name, record in records.items():
            given[name] = record(**{field: given.pop(option) for field, option in options[name].items()})
        command(**given)

    # Typer reads both.
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def console() -> Console:
    """Return the console for messages: standard error, since standard output is for results."""
    # No emoji: `name:key:max` is a line of a key file, not an emoji code.
    return Console(stderr=True, emoji=False)


def result_console() -> Console:
    """Return the console for results: standard output. When it is piped, lines are neither truncated nor wrapped."""
    return Console(emoji=False) if sys.stdout.isatty() else Console(width=_PIPE_COLUMNS, emoji=False)


def show(document: RenderableType, to: Console | None = None, *, markup: bool = False) -> None:
    """Print a table or text at its full width, on standard error by default. Cells are not truncated; on a narrower
    terminal the lines wrap."""
    screen = to or console()
    # A console cannot measure beyond its own width, so it is measured with the widest one.
    needed = Measurement.get(screen, screen.options.update(width=_PIPE_COLUMNS, markup=markup), document).maximum
    screen.width = max(screen.width, needed)
    screen.print(document, highlight=False, crop=False, markup=markup)


def say(*lines: str) -> None:
    """Print lines as they are, without markup or highlighting."""
    for line in lines:
        console().print(line, highlight=False, soft_wrap=True, markup=False)


class Steadily:
    """Progress callback `(done, total)` that prints at most one line every `EVERY_S` seconds."""

    def __init__(self, what: str) -> None:
        self._what, self._told_s = what, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= EVERY_S:
            self._told_s = now_s
            say(f"{done} of {total} {self._what}")


def engine_table(engines: Iterable[EngineStatus]) -> Table:
    """Return engines as a table, for the commands that show them."""
    table = Table("engine", "from", "state", "version", "load", "url", "why not", box=None)
    for engine in engines:
        table.add_row(
            engine.engine_id,
            engine.origin.value,
            engine.state.value,
            engine.version or "-",
            engine.load,
            engine.url or "-",
            engine.reason,
        )
    return table


def write_json(document: Any, path: Path | None) -> bool:
    """Write a document as JSON to a file, or to standard output if the path is `-`; return False without a path.
    Records may be part of the document. Raises ConfigError."""
    if path is None:
        return False
    data = orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n"
    if str(path) == "-":
        sys.stdout.buffer.write(data)
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        except OSError as error:
            raise ConfigError(f"--json {path}: cannot be written ({error.strerror}); name another file") from error
    return True


def announce(url: str, json: Path | None) -> None:
    """Print the URL at which a server listens. With `--json`, write it with the process id, to standard output in place
    of the URL or to a file."""
    started = {"url": url, "pid": os.getpid()}
    if str(json) == "-":
        typer.echo(orjson.dumps(started).decode())
        return
    write_json(started, json)
    typer.echo(url)


def addressed(json: Path | None) -> tuple[Path | None, Callable[[str], None]]:
    """Return the file of `--json` for a server that writes more than its URL into it, and how to announce its URL."""
    file = None if str(json) == "-" else json
    return file, lambda url: announce(url, None if file else json)


EXPECTED: tuple[type[Exception], ...] = (
    RunError,
    ActorError,
    ReplayError,
    TaskFileError,
    PolicyError,
    LearnerError,
    SandboxError,
    ServeError,
)
