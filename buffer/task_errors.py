"""Errors of task files.

TaskFileError           a task file, or one line of it, cannot be used: one line with file, line number, key and fix
"""

from __future__ import annotations


class TaskFileError(Exception):
    """A task file cannot be used. `str()` is one line: `FILE:LINE: key: what is wrong; what to do`."""
