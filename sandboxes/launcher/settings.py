"""Settings of the launcher, sent by its owner, and the error by which the launcher refuses a request."""

from __future__ import annotations

from typing import NamedTuple


class Settings(NamedTuple):
    """Settings of the launcher, sent by its owner as one line of JSON on standard input."""

    owner_pid: int
    """0 means that there is no owner."""
    tied: bool
    """True if the launcher ends when its standard input ends."""
    idle_exit_s: float
    socket_path: str
    ids_folder: str
    """Folder in which all launchers of the host claim their user ids."""
    max_sandboxes: int
    """Frozen sandboxes count too."""
    max_live: int | None
    """None: 64, or fewer on a small host."""
    layer_bytes: int
    layers_in: str
    """Folder of the host's disk for file layers; empty: they are stored in memory."""
    min_free_bytes: int
    memory_bytes: int | None
    cpus: float | None
    processes: int | None
    open_files: int | None
    """None: a share of the host's total (host_limits)."""
    boot_timeout_s: float
    label: str


class RequestRefused(Exception):
    """Refusal of a request, which is answered with the error `name` of headrace.sandboxes.errors."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
