"""The environment of every process below another one, read from the kernel again and again while a block runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

LOOK_S = 0.2


class Seen(NamedTuple):
    """A program that ran, with its complete environment."""

    command: str
    environment: dict[str, str]


@contextmanager
def environments_below(process_id: int, path: Path) -> Iterator[None]:
    """Write what was seen to `path` when the block ends."""
    ended, seen = threading.Event(), {}

    def watch() -> None:
        while not ended.wait(LOOK_S):
            try:
                children = psutil.Process(process_id).children(recursive=True)
            except psutil.NoSuchProcess:
                # It ended, which whoever waits for it notices later.
                return
            for process in children:
                try:
                    command = tuple(process.cmdline())
                    environment = process.environ()
                    # Else it became another program in between, and the two do not belong together.
                    if command and command == tuple(process.cmdline()):
                        seen[process.pid, command] = environment
                except (psutil.Error, OSError):
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        path.write_text(json.dumps([(" ".join(command), environment) for (_, command), environment in seen.items()]))


def read_environments(path: Path) -> list[Seen]:
    return [Seen(command, environment) for command, environment in json.loads(path.read_text())]
