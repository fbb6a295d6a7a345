"""Detection of sandboxes that a run has left on this host, using only the host's process list.

Invariants: a launcher and the first process of each of its sandboxes have the label of their run in their command line.
Nothing else can be left over, because a sandbox's other processes and mounts die with its first process.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from headrace.sandboxes.linux.processes import parse_stat

LAUNCHER_NAME: Final = "headrace-launcher"
IDENTITY_FILE: Final = "run_id"
"""Name of the file in a run directory that holds the run's id."""


def run_label(run: Path) -> str:
    """Return the label of a run directory: a hash, because every process in a sandbox can read it. It depends on the
    path and on the run's id. Both are needed: containers that share /tmp, and machines that share a sandbox server,
    have different runs at the same path, and a copied run directory has the original's id."""
    identity = ""
    with suppress(FileNotFoundError):
        identity = (run / IDENTITY_FILE).read_text()
    return hashlib.sha256(f"{run.resolve()}\0{identity}".encode()).hexdigest()[:16]


def sandboxes_left(run: Path) -> int:
    """Count living processes (launcher and sandboxes) with the label of `run`."""
    command = f"{LAUNCHER_NAME} {run_label(run)}".encode()
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if parse_stat((process / "stat").read_text(errors="replace")).state in "ZX":
                continue
            found += (process / "cmdline").read_bytes().rstrip(b"\0") == command
    return found
