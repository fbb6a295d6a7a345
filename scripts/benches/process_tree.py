"""Resource usage of this process and its descendants; processes that end during the measurement are left out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import psutil


def cpu_s() -> float:
    """Return the user and system time of all processes in the tree, including reaped children."""
    total = 0.0
    for process in _tree():
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def memory_bytes() -> dict[str, int]:
    """Return the proportional set size (PSS) by process name: a page that n processes share counts 1/n in each."""
    found: dict[str, int] = {}
    for process in _tree():
        with suppress(psutil.NoSuchProcess):
            name = process.name()
            found[name] = found.get(name, 0) + process.memory_full_info().pss
    return found


def _tree() -> Iterator[psutil.Process]:
    this = psutil.Process()
    yield this
    yield from this.children(recursive=True)
