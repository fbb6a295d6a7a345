"""A driver that can be asked: `python -m headrace.actors.simulation.soaked RUN DESCRIPTOR` starts or resumes a run and
answers each line on its standard input with a JSON line on the open file DESCRIPTOR (Ray prints on standard output).

`processes`: the process ids of service and actors by name. `reached N`: whether the run has made, or makes, step N.

Invariant: it does nothing to the run but drive it; who asks may kill what it names.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import orjson

from headrace.actors.errors import ActorLost
from headrace.actors.launch import drive, reopen
from headrace.actors.resuming import Resuming
from headrace.actors.retry import until_back
from headrace.actors.runtime import RayRuntime

if TYPE_CHECKING:
    from headrace.actors.service import Service


async def answer(service: Service, answers: BinaryIO) -> None:
    """Until nobody asks any more."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while question := await reader.readline():
        word, *rest = question.decode().split()
        if word == "processes":
            found: object = await processes(service)
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


def main(run_dir: Path, descriptor: int) -> None:
    config, directory = reopen(run_dir)
    with os.fdopen(descriptor, "wb", buffering=0) as answers:
        # As `headrace resume` does it.
        before = Resuming(config, directory, say=print).tell
        drive(config, directory, quiet=True, before=before, beside=lambda service: answer(service, answers))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
