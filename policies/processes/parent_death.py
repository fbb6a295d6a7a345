"""Kills a process when its parent dies, using the kernel's parent-death signal (Linux).

`python -I -S parent_death.py PARENT_PID COMMAND ...` does that for any program and its child processes: it forks a
watcher, which kills the process group when the program exits, and then executes the program. It uses only the standard
library, because it runs outside any environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Request SIGKILL when the parent dies (prctl(2), PR_SET_PDEATHSIG), and exit at once if it is already dead.

    The kernel watches the thread that started this process, so that thread must live as long as the parent."""
    _request_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} is already dead")


def outlive_parent() -> None:
    """Withdraw the request of `die_with_parent`. Call it in the same thread."""
    _request_signal(0)


def watch_group() -> None:
    """Fork a process that kills the process group, including itself, when the calling process dies.

    The program's own children may not have requested the signal yet when it dies: Python's imports take seconds."""
    watched = os.getpid()
    if os.fork() != 0:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    _request_signal(signal.SIGUSR1)
    if os.getppid() == watched:
        signal.sigwait({signal.SIGUSR1})
    os.killpg(0, signal.SIGKILL)


def _request_signal(number: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def main() -> None:
    """Run the program. Its process must lead a process group."""
    parent_pid, *command = sys.argv[1:]
    die_with_parent(int(parent_pid))
    watch_group()
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
