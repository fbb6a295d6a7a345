"""The driver of a soaked run, which answers questions about its processes.

`python -m benches.long_runs.soaked_run RUN DESCRIPTOR` starts or resumes a run and answers each line on standard input
with a JSON line on the open file DESCRIPTOR (Ray prints on standard output). `processes` returns the process ids of
service and actors by name; `reached N` returns whether the run has made, or will make, step N; `engines down` and
`engines up` return true once no turn can begin, or once turns can begin again.

Invariants:
- The driver only drives the run and answers questions; the asking process may kill the named processes.
- Its exit code is that of `headrace resume`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import orjson

from headrace.actors.errors import ActorLost
from headrace.actors.run.exit_codes import exit_code_of_run
from headrace.actors.run.launch import drive, reopen
from headrace.actors.run.resume import ResumePreparation
from headrace.actors.run.service import Service
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime
from headrace.actors.runtime.simulated.engines import SimulatedEngineGroup


async def answer(service: Service, answers: BinaryIO) -> None:
    """Answer questions until the end of standard input."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while question := await reader.readline():
        word, *rest = question.decode().split()
        if word == "processes":
            found: object = await processes(service)
        elif word == "engines":
            found = await move_engines(rest[0])
        else:
            found = await until_back(lambda: service.reached(int(rest[0])))  # noqa: B023
        answers.write(orjson.dumps(found) + b"\n")


async def processes(service: Service) -> dict[str, int]:
    """Return the process ids of all live actors and the service, by name."""
    runtime = RayRuntime()
    found = await until_back(service.process_ids)
    with suppress(ActorLost):
        found["service"], _ = await runtime.stats(service)
    return found


async def move_engines(where: str) -> bool:
    """Take the engines down or up, with retries, since their actor may be dead; a restarted one is up."""
    engines = await RayRuntime().find(SimulatedEngineGroup, "engines")
    await until_back(engines.go_down if where == "down" else engines.come_back)
    return True


def main(run_dir: Path, descriptor: int) -> None:
    """Drive the run. Raises SystemExit."""
    try:
        drive_and_answer(run_dir, descriptor)
    except Exception as error:
        # Each error has an exit code, as on the command line.
        logging.getLogger(__name__).error("the run ended", exc_info=error)
        sys.exit(exit_code_of_run(error))


def drive_and_answer(run_dir: Path, descriptor: int) -> None:
    """Drive the run until it ends, and raise the error that ends it."""
    config, directory = reopen(run_dir)
    with os.fdopen(descriptor, "wb", buffering=0) as answers:
        # The same as in `headrace resume`.
        before = ResumePreparation(config, directory, say=print).prepare
        drive(config, directory, quiet=True, before=before, beside=lambda service: answer(service, answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
