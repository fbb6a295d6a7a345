# ruff: noqa: PTH123
# (pathlib is not imported, because this program is started for every command)
"""Program that runs one command in a container and stays its parent until it ends.

The standard streams are the command's own. The argument is one JSON object. The descriptor in its field `status`
receives {pid} once the command is running, then {exit_code, timed_out, duration_s}: one JSON object per line.

Invariants:
- A command never outlives its timeout, nor this process (SIGTERM, or the death of the parent, cancels it). Its tree is
  killed by its own control group, which no daemon can leave, or from inside where the runtime has none (gVisor).
- If the runtime cannot start the command, its message becomes the command's standard error, and the exit code is 126.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import Any, Final

from headrace.sandboxes.linux import syscalls
from headrace.sandboxes.oci.cgroups import SubGroup

_EXIT_CANNOT_RUN: Final = 126
_KILL_WAIT_S: Final = 5.0

Order = dict[str, Any]


def main() -> None:
    order: Order = json.loads(sys.argv[-1])
    syscalls.become_subreaper()
    parent = os.getppid()
    syscalls.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return
    wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _note)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _Run(order, wake).run()


_cancelled: list[int] = []


def _note(number: int, _frame: object) -> None:
    if number == signal.SIGTERM:
        _cancelled.append(number)


class _Run:
    def __init__(self, order: Order, wake: int) -> None:
        self._order = order
        self._wake = wake
        self._started = time.monotonic()
        self._group = SubGroup(order["group"])
        self._status: int = order["status"]
        self._pid = 0
        self._code: int | None = None
        self._timed_out = False

    def run(self) -> None:
        os.set_inheritable(self._status, False)
        self._group.make()
        runtime = os.posix_spawn(self._order["command"][0], self._order["command"], _ENVIRONMENT, setsigdef=_DEFAULTS)
        deadline = None if self._order["timeout_s"] is None else self._started + self._order["timeout_s"]
        while not self._ended(runtime):
            if _cancelled or (deadline is not None and time.monotonic() >= deadline):
                self._timed_out = True
                self._kill(runtime)
                break
            self._sleep(deadline)
        self._group.remove()
        self._report(
            {"exit_code": self._code, "timed_out": self._timed_out, "duration_s": time.monotonic() - self._started}
        )

    def _report(self, message: Order) -> None:
        with suppress(OSError):
            os.write(self._status, json.dumps(message).encode() + b"\n")

    def _sleep(self, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.poll(None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000) + 1))
        with suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass

    def _ended(self, runtime: int) -> bool:
        """Reap ended children; return whether the command has ended. A detached command becomes a child of this process
        when the runtime ends."""
        while self._code is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # No child is left and none was the command: the sandbox died while it ran.
                self._code = 128 + signal.SIGKILL
                return True
            if pid == 0:
                return False
            code = os.waitstatus_to_exitcode(status)
            if pid == runtime and (code != 0 or not self._order["detached"]):
                self._code = _EXIT_CANNOT_RUN if self._order["detached"] else _exit_code(code)
            elif pid == runtime:
                self._pid = _read_pid(self._order["pid_file"])
                self._report({"pid": self._pid})
            elif pid == (self._pid or _read_pid(self._order["pid_file"])):
                self._code = _exit_code(code)
        return True

    def _kill(self, runtime: int) -> None:
        if self._order["inside"]:
            inside = os.posix_spawn(self._order["inside"][0], self._order["inside"], _ENVIRONMENT, setsigdef=_DEFAULTS)
            descriptor = os.pidfd_open(inside)
            try:
                if not select.select([descriptor], [], [], _KILL_WAIT_S)[0]:
                    os.kill(inside, signal.SIGKILL)
            finally:
                os.close(descriptor)
        with suppress(ProcessLookupError):
            os.kill(runtime, signal.SIGKILL)
        self._group.kill()
        # In a paused sandbox the kill takes effect only at the end of the pause, for which this process does not wait.
        until = time.monotonic() + _KILL_WAIT_S
        while time.monotonic() < until:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    self._sleep(until)
            except ChildProcessError:
                return


_ENVIRONMENT: Final = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_DEFAULTS: Final = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _read_pid(path: str) -> int:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read() or 0)
    except FileNotFoundError:
        return 0


if __name__ == "__main__":
    main()
