"""Creators of incarnations that are killed before each of their file operations in turn:
`python -m support.killed_creator FOLDER [no-links]`.

In `FOLDER/N` a state folder and its storage have held incarnation 1, and the creator of 2 is killed before its N-th
operation there. Prints one line for each N with the number that the next creator takes, until one was not killed.
With `no-links` the storage has no hard links.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from itertools import count
from pathlib import Path
from typing import Any, Final

from headrace.actors.errors import RunFenced
from headrace.actors.record.storage.incarnation import FenceConfig, Incarnation

QUICK: Final = FenceConfig(renew_s=0.1, end_after_s=2.0, takeover_s=2.5, margin_s=0.3)
OPERATIONS: Final = frozenset({"open", "os.rename", "os.mkdir", "os.remove", "os.link"})


async def take(folder: Path) -> int:
    """Take the next incarnation and end it in order. Return its number."""
    incarnation = await Incarnation.take(folder, QUICK, held=folder / "held", sole_on_host=True)
    await incarnation.end()
    return incarnation.number


def take_killed(folder: Path, at: int) -> bool:
    """Take an incarnation in a process that is killed before its operation number `at`. Return whether it was."""
    if (child := os.fork()) == 0:
        seen = 0

        def strike(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event in OPERATIONS and str(arguments[0]).startswith(str(folder)):
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(strike)
        asyncio.run(take(folder))
        os._exit(0)
    return os.waitpid(child, 0)[1] != 0


def refuse_links(event: str, _: tuple[Any, ...]) -> None:
    """Fail every link of this process, as a file system without hard links does."""
    if event == "os.link":
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def main(root: Path, *, links: bool) -> None:
    """Kill creators until one comes through."""
    if not links:
        sys.addaudithook(refuse_links)
    for at in count(1):
        folder = root / str(at)
        folder.mkdir()
        asyncio.run(take(folder))
        # As a driver leaves it.
        killed = take_killed(folder, at)
        try:
            said = f"takes {asyncio.run(take(folder))}"
        except RunFenced as error:
            said = str(error)
        print(said, "killed" if killed else "done", flush=True)
        if not killed:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), links="no-links" not in sys.argv)
