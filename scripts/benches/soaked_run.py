"""A driver that can be asked: `python -m benches.soaked_run RUN DESCRIPTOR` starts or resumes a run and
answers each line on its standard input with a JSON line on the open file DESCRIPTOR (Ray prints on standard output).

`processes`: the process ids of service and actors by name. `reached N`: whether the run has made, or makes, step N.
`engines down` and `engines up`: that no turn of an agent can begin, until it can again; true once it is so.

Invariants:
- It does nothing to the run but drive it and what it is asked to do; who asks may kill what it names.
- Its exit code is that of `headrace resume`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import orjson

from headrace.actors.errors import ActorLost
from headrace.actors.run.exit_codes import exit_code_of_run
from headrace.actors.run.launch import drive, reopen
from headrace.actors.run.resume import Resuming
from headrace.actors.runtime.retry import until_back
from headrace.actors.runtime.runtime import RayRuntime
from headrace.actors.simulated.engines import SimulatedEngineGroup

if TYPE_CHECKING:
    from headrace.actors.run.service import Service


async def answer(service: Service, answers: BinaryIO) -> None:
    """Until nobody asks any more."""
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
    """Of all that live now; the service itself is one of them."""
    runtime = RayRuntime()
    found = await until_back(service.process_ids)
    with suppress(ActorLost):
        found["service"], _ = await runtime.stats(service)
    return found


async def move_engines(where: str) -> bool:
    """As often as it takes: they may be down for another reason. One that is started anew is up."""
    engines = await RayRuntime().find(SimulatedEngineGroup, "engines")
    await until_back(engines.go_down if where == "down" else engines.come_back)
    return True


def main(run_dir: Path, descriptor: int) -> None:
    """Raises SystemExit."""
    try:
        drive_and_answer(run_dir, descriptor)
    except Exception as error:
        # As at the command line: each error has an exit code.
        logging.getLogger(__name__).error("the run ended", exc_info=error)
        sys.exit(exit_code_of_run(error))


def drive_and_answer(run_dir: Path, descriptor: int) -> None:
    """One life of a run. Raises what ends it."""
    config, directory = reopen(run_dir)
    with os.fdopen(descriptor, "wb", buffering=0) as answers:
        # As `headrace resume` does it.
        before = Resuming(config, directory, say=print).tell
        drive(config, directory, quiet=True, before=before, beside=lambda service: answer(service, answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
