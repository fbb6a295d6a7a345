"""A process that dies with its parent, by the kernel's own signal (Linux).

`python -I -S parent_death.py PARENT_PID COMMAND ...` gives that to a program that is not ours, and to all that it
starts: it becomes the program, after leaving a watcher behind that kills the process group when the program is gone.
The standard library alone: it runs outside of any environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask for SIGKILL when the parent is gone (prctl(2), PR_SET_PDEATHSIG); end at once if it is gone already.

    The kernel watches the thread that started us: start processes from a thread that lives as long as its process."""
    _ask_for(signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"parent {parent_pid} is gone already")


def watch_group() -> None:
    """Fork a process that kills the process group, itself included, when the calling process is gone.

    A program's own children may not have asked for the signal yet when it dies: Python needs seconds to import."""
    watched = os.getpid()
    if os.fork() != 0:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    _ask_for(signal.SIGUSR1)
    if os.getppid() == watched:
        signal.sigwait({signal.SIGUSR1})
    os.killpg(0, signal.SIGKILL)


def _ask_for(number: signal.Signals) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def main() -> None:
    """The program. Its process must lead a group."""
    parent_pid, *command = sys.argv[1:]
    die_with_parent(int(parent_pid))
    watch_group()
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
