"""What sandboxes of a run are left on this host: found by looking at its processes, not by asking anybody.

Invariants: a launcher and the first process of each of its sandboxes bear the label of their run in their command line;
nothing else can be left, for every other process and mount of a sandbox dies with its first process.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from headrace.sandboxes.kernel.processes import parse_stat

LAUNCHER_NAME: Final = "headrace-launcher"
IDENTITY_FILE: Final = "run_id"
"""In a run directory: the id of the run."""
LABEL_VARIABLE: Final = "HEADRACE_SANDBOX_LABEL"
"""Set in the environment of every process of the subprocess provider."""


def run_label(run: Path) -> str:
    """The label of a run directory: a hash, for everybody in a sandbox can read it.

    It is made of the path and of the run's id. Containers that share /tmp, and machines that share a sandbox server,
    have different runs at the same path; a copied run directory has the id of the first.
    """
    identity = ""
    with suppress(FileNotFoundError):
        identity = (run / IDENTITY_FILE).read_text()
    return hashlib.sha256(f"{run.resolve()}\0{identity}".encode()).hexdigest()[:16]


def sandboxes_left(run: Path) -> int:
    """Living processes (launcher, sandboxes, and marked ones of the subprocess provider) with the label of `run`."""
    label = run_label(run)
    return sum(_bears(entry, label) for entry in Path("/proc").glob("[0-9]*"))


def _bears(process: Path, label: str) -> bool:
    try:
        if parse_stat((process / "stat").read_text(errors="replace")).state in "ZX":
            return False
        command = (process / "cmdline").read_bytes().rstrip(b"\0")
        return command == f"{LAUNCHER_NAME} {label}".encode() or _is_marked(process, label)
    except OSError:
        return False


def _is_marked(process: Path, label: str) -> bool:
    try:
        return f"\0{LABEL_VARIABLE}={label}\0".encode() in b"\0" + (process / "environ").read_bytes()
    except OSError:
        # Somebody else's process, or one that cannot be inspected: no process of the subprocess provider is either.
        return False
