"""The command `headrace logs`, which prints what the actors of a run logged."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Final

import typer

from headrace.actors.cli.cluster_access import ClusterOptions
from headrace.actors.cli.output import say, with_records
from headrace.actors.cli.remote_runs import print_logs
from headrace.actors.errors import ConfigError, RunRefused
from headrace.actors.record.files.log_lines import RunLogs, Wanted, actor_of, logs_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from headrace.actors.record.files.run_directory import RunDirectory

FOLLOW_S: Final = 0.5
"""Interval between two looks for new lines."""


@with_records
def logs(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run, or its id on a cluster.")],
    cluster: ClusterOptions,
    actor: Annotated[str | None, typer.Argument(metavar="[ACTOR]", help="Actor; by default all.")] = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", metavar="ID", help="Only what was logged for this rollout.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Only what was logged for this attempt of --rollout.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Print new lines until the run has ended.")] = False,
    limit_bytes: Annotated[
        int | None, typer.Option("--limit-bytes", min=1, help="Print at most this many bytes of the log files.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Write the JSON lines to this file ('-' is standard output).")
    ] = None,
) -> None:
    """Print the logs of a run's actors in the order of time: those in the run directory of this host, with the copies
    that it has from other nodes. Over --address and --url, one actor after another unless --rollout is given."""
    from headrace.actors.run.launch import reopen

    if attempt is not None and rollout is None:
        raise ConfigError("--attempt needs --rollout: name the rollout whose attempt this is")
    wanted = Wanted(actor=actor, rollout=rollout, attempt=attempt)
    if not cluster:
        _print(reopen(run_dir)[1], wanted, follow=follow, limit_bytes=limit_bytes, json=json)
        return
    if json is not None or limit_bytes is not None:
        raise ConfigError("--json and --limit-bytes need the run directory: leave them out with --address or --url")
    print_logs(cluster, str(run_dir), wanted, follow=follow, render=as_text)


def as_text(event: Mapping[str, Any]) -> str:
    """Return an event as `time level actor message`, with its exception on lines of their own. Text of agents may be
    part of it, so control characters are escaped."""
    time = datetime.fromtimestamp(event["time"], UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    text = "\n".join(str(event[key]) for key in ("message", "exception") if key in event)
    head = f"{event['level']} {event['actor']} "
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in head + text)
    return f"{time} " + shown.replace("\n", "\n  ")


def _print(
    directory: RunDirectory, wanted: Wanted, *, follow: bool, limit_bytes: int | None, json: Path | None
) -> None:
    """Print the wanted lines of a run directory. Raises ConfigError and RunRefused."""
    known = sorted({actor_of(name) for name in logs_in(directory.logs)})
    if wanted.actor is not None and wanted.actor not in known and not follow:
        listed = ", ".join(known) or "none"
        raise RunRefused(f"no log of an actor {wanted.actor[:100]!r}; actors with a log on this node: {listed}")
    printer = _Printer(json, limit_bytes)
    with _output(json) as file:
        is_over = (lambda: not directory.is_driven()) if follow else _at_once
        printer.print(RunLogs(directory.logs, wanted), file, until=is_over)
        if not printer.count and wanted.rollout is not None and not follow:
            whole = _whole_id(directory, wanted.rollout)
            if whole != wanted.rollout:
                named = Wanted(actor=wanted.actor, rollout=whole, attempt=wanted.attempt)
                printer.print(RunLogs(directory.logs, named), file, until=_at_once)
    if printer.is_full and not printer.count:
        say("nothing within --limit-bytes")
    elif not printer.count:
        say(f"{directory.path} has no logs" if wanted.rollout is None else f"nothing was logged for {wanted.rollout}")


class _Printer:
    """Writes lines until a limit of bytes of the log files is reached."""

    def __init__(self, json: Path | None, limit_bytes: int | None) -> None:
        self._as_json = json is not None
        self._left_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self.count = 0
        self.is_full = False

    def print(self, logs: RunLogs, file: BinaryIO, *, until: Callable[[], bool]) -> None:
        """Write new lines until `until`, which is asked before each look for them, has returned True."""
        is_last = False
        while not is_last and not self.is_full:
            is_last = until()
            for line in logs.new_lines():
                self._left_bytes -= len(line.raw) + 1
                if self._left_bytes < 0:
                    self.is_full = True
                    break
                file.write((line.raw if self._as_json else as_text(line.event).encode()) + b"\n")
                self.count += 1
            file.flush()
            if not is_last:
                time.sleep(FOLLOW_S)


def _at_once() -> bool:
    return True


def _whole_id(directory: RunDirectory, given: str) -> str:
    """Return the id of the rollout in the ledger that is, or begins with, the given one. Raises ConfigError if there is
    none, or more than one, and LedgerRefused."""
    from headrace.actors.telemetry.slow.terminal_text import whole_id
    from headrace.buffer.audit.evidence import rows_of

    with rows_of(directory.path) as tables:
        ids = {row[0] for table in ("rollouts", "evaluations") for row in tables.select(table, ["rollout_id"])}
    return whole_id(given, sorted(ids))


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
