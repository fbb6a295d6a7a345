# ruff: noqa: PTH123
# (pathlib stays out: it is started once for every command)
"""Runs one command in a container and stays its parent until it ends; standard streams are the command's own.

Argument: one JSON object. Its descriptor `status` gets {pid} once the command runs, then {exit_code, timed_out,
duration_s}, one JSON object a line.

Invariants:
- A command never outlives its timeout, nor this process (SIGTERM, or the death of its parent, is a cancel): its tree is
  killed by its own control group, which no daemon leaves, or where the runtime shows none (gVisor) from the inside.
- What the runtime says when it cannot start the command is the command's standard error, with exit code 126.
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

from headrace.sandboxes.kernel import syscalls
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
        self._tell(
            {
                "exit_code": self._code,
                "timed_out": self._timed_out,
                "duration_s": time.monotonic() - self._started,
            }
        )

    def _tell(self, message: Order) -> None:
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
        """Take what has ended. With a detached command the runtime leaves first, and the command becomes our child."""
        while self._code is None:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # Nobody left and no word of the command: the sandbox died under it.
                self._code = 128 + signal.SIGKILL
                return True
            if pid == 0:
                return False
            code = os.waitstatus_to_exitcode(status)
            if pid == runtime and (code != 0 or not self._order["detached"]):
                self._code = _EXIT_CANNOT_RUN if self._order["detached"] else _exit_code(code)
            elif pid == runtime:
                self._pid = _read_pid(self._order["pid_file"])
                self._tell({"pid": self._pid})
            elif pid == (self._pid or _read_pid(self._order["pid_file"])):
                self._code = _exit_code(code)
        return True

    def _kill(self, runtime: int) -> None:
        if self._order["inside"]:
            inside = os.posix_spawn(self._order["inside"][0], self._order["inside"], _ENVIRONMENT, setsigdef=_DEFAULTS)
            _wait(inside, _KILL_WAIT_S)
        with suppress(ProcessLookupError):
            os.kill(runtime, signal.SIGKILL)
        self._group.kill()
        # In a paused sandbox the kill waits for the end of the pause; nobody waits for that.
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


def _wait(pid: int, seconds: float) -> None:
    descriptor = os.pidfd_open(pid)
    try:
        if not select.select([descriptor], [], [], seconds)[0]:
            os.kill(pid, signal.SIGKILL)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
