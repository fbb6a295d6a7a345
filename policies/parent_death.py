"""A process that dies with its parent, by the kernel's own signal (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask for SIGKILL when the parent is gone (prctl(2), PR_SET_PDEATHSIG); end at once if it is gone already.

    The kernel watches the thread that started us: start processes from a thread that lives as long as its process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} is gone already")
