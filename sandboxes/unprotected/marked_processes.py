"""Ending processes that carry a mark in their environment: the subprocess provider finds them by nothing better."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path


def kill_marked(mark: str) -> None:
    """Kill, until none is found twice in a row, every process that carries `NAME=value` in its environment. A process
    that is just being replaced by another program shows no environment."""
    needle = b"\0" + mark.encode() + b"\0"
    missed = 0
    for _ in range(100):
        found = [entry for entry in Path("/proc").glob("[0-9]*") if needle in b"\0" + _environment(entry)]
        missed = 0 if found else missed + 1
        if missed == 2:
            return
        for entry in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry.name), signal.SIGKILL)


def _environment(entry: Path) -> bytes:
    """Empty for a process that is dead (also a zombie) or not ours."""
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""
