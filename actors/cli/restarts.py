"""Exit code and automatic restarts (`--restarts`) of a run that fails."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.actors.cli.output import say
from headrace.actors.record.files.disk_space import lacks_space
from headrace.actors.run.restarts import RestartLoop, RestartPolicy, saved_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from headrace.actors.record.files.run_directory import RunDirectory
    from headrace.actors.run.config import RunConfig

Restarts = Annotated[
    int,
    typer.Option(
        min=0, metavar="N", help="Resume up to N times after transient failures (exit code 75, or death by a signal)."
    ),
]
HEADRACE = (sys.executable, "-c", "from headrace.actors.cli.app import main; main()")


class RunEnded(Exception):
    """A run failed after it had started."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


@contextmanager
def ending_a_run() -> Iterator[None]:
    """Convert errors raised in the block to failures of a started run. Raises RunEnded."""
    try:
        yield
    except Exception as error:
        raise RunEnded(error) from error


def resume_again_and_again(
    config: RunConfig,
    directory: RunDirectory,
    restarts: int,
    *,
    json: Path | None,
    quiet: bool,
    once: Sequence[str] = (),
) -> int:
    """Resume a run with up to `restarts` restarts and return the exit code. Only the first attempt is given the options
    in `once`."""
    command = [*HEADRACE, "resume", str(directory.path)]
    if json is not None:
        command += ["--json", str(json)]
    if quiet:
        command.append("--quiet")
    full = partial(lacks_space, directory, config.service.min_free_bytes)
    loop = RestartLoop(RestartPolicy(restarts), say, partial(saved_step, directory), full)
    return loop.run([*command, *once], command)
