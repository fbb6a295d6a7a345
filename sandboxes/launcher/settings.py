"""What the launcher is told by its owner, and how it refuses a request."""

from __future__ import annotations

from typing import NamedTuple


class Settings(NamedTuple):
    """What the owner sends as one line of JSON on standard input."""

    owner_pid: int
    """0 for none."""
    tied: bool
    """The end of standard input is the end of the launcher."""
    idle_exit_s: float
    socket_path: str
    ids_folder: str
    """Where all launchers of the host claim their user ids."""
    max_sandboxes: int
    """Those that are frozen count too."""
    max_live: int | None
    """None for 64, or fewer where the host is small."""
    layer_bytes: int
    layers_in: str
    """A folder of the host's disk for file layers; empty: they lie in memory."""
    min_free_bytes: int
    memory_bytes: int | None
    cpus: float | None
    processes: int | None
    open_files: int | None
    """None for a share of what the host has (host_limits)."""
    boot_timeout_s: float
    label: str


class Refused(Exception):
    """A request is answered with the error `name` of headrace.sandboxes.errors."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
