"""Version of headrace that this process runs, and the one that is installed.

Invariants:
- An installation may be replaced while a process runs. What a process has imported stays as it was, so the version of
  its code is read once, with the first import.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

RUNNING: Final = version("headrace")
"""Version of the code in this process."""


def installed() -> str:
    """Return the version that a new process would run."""
    return version("headrace")
