"""The command `headrace logs`, which prints what the actors of a run logged."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import orjson
import typer

from headrace.actors.cli.output import say
from headrace.actors.cli.remote_runs import Address, KeyPath, Owner, Url, access, print_logs
from headrace.actors.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["logs"]

PAGE_BYTES: Final = 1 << 20


def logs(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, or its id on a cluster.")],
    actor: Annotated[str | None, typer.Argument(metavar="[ACTOR]", help="Actor; by default all, by name.")] = None,
    limit_bytes: Annotated[
        int | None, typer.Option("--limit-bytes", min=1, help="Print at most this many bytes of the log files.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the JSON lines to this file ('-' is standard output).")
    ] = None,
    address: Address = None,
    owner: Owner = "",
    url: Url = None,
    key_file: KeyPath = None,
) -> None:
    """Print the logs of a run's actors, the oldest line of each first (those in the run directory of this host, or of
    the control node of a cluster)."""
    from headrace.actors.run.launch import reopen

    if (cluster := access(url, key_file, address, owner)) is not None:
        if json is not None or limit_bytes is not None:
            raise ConfigError("--json and --limit-bytes need the run directory: leave them out with --address or --url")
        print_logs(cluster, str(run_dir), actor, render=as_text)
        return
    directory = reopen(run_dir)[1]
    count = 0
    with _output(json) as file:
        for line in _lines(directory.logs, actor, limit_bytes):
            file.write((line if json is not None else as_text(line)).encode() + b"\n")
            count += 1
    if not count:
        say(f"{directory.path} has no logs" if limit_bytes is None else "nothing within --limit-bytes")


def as_text(line: str) -> str:
    """Return a JSON line as `time level actor message`, with its exception on lines of their own. Text of agents may be
    part of it, so control characters are escaped."""
    event = orjson.loads(line)
    time = datetime.fromtimestamp(event["time"], UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = "\n".join(event[key] for key in ("message", "exception") if key in event)
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
    return f"{time} {event['level']} {event['actor']} " + shown.replace("\n", "\n  ")


def _lines(folder: Path, actor: str | None, limit_bytes: int | None) -> Iterator[str]:
    """Yield the lines of the logs, of at most `limit_bytes` in all, until there are no more. Raises RunRefused."""
    from headrace.actors.runs.log_pages import read_logs

    page = read_logs(folder, actor, after="", limit_bytes=PAGE_BYTES)
    printed_bytes = 0
    while page.lines:
        for line in page.lines:
            printed_bytes += len(line.encode()) + 1
            if limit_bytes is not None and printed_bytes > limit_bytes:
                return
            yield line
        page = read_logs(folder, actor, after=page.cursor, limit_bytes=PAGE_BYTES)


@contextmanager
def _output(path: Path | None) -> Iterator[BinaryIO]:
    """Open the file, or standard output if there is none or its name is `-`. Raises ConfigError. The block ends early
    when the reader of standard output has gone, such as `head`."""
    if path is None or str(path) == "-":
        try:
            yield sys.stdout.buffer
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # Python flushes standard output again when it exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError as error:
        raise ConfigError(f"--json {path}: cannot be written ({error.strerror}); name another file") from error
    with file:
        yield file
