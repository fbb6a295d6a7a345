# ruff: noqa: PTH103, PTH120
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""Work of a freshly forked child inside a sandbox: become a user, then run a command, or read or write files.

Small files that are written before any command has run are written by the first process itself (`write_now`).

Invariants:
- All operations except `write_now` run after the fork, never return, and end the process with `os._exit` or `execve`.
- Files are opened with the rights of the sandbox's user, by a process inside, so that an agent's link or path reaches
  only what the agent could reach itself. Only regular files are read or written; FIFOs and devices are refused without
  blocking.
- The environment consists of fixed variables and the caller's; nothing is inherited, and no shell startup file is read.
"""

from __future__ import annotations

import errno  # noqa: F401 - PRELOADED
import fcntl
import gc
import json  # noqa: F401 - PRELOADED
import os
import re  # noqa: F401 - PRELOADED
import resource
import signal
import socket
import stat
import struct
import sys
import termios
import time
from contextlib import suppress
from typing import Any, Final, NamedTuple, NoReturn

from headrace.sandboxes.linux import syscalls
from headrace.sandboxes.linux.rootfs import Image

SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

EXIT_CANNOT_RUN: Final = 126
EXIT_FILE_ERROR: Final = 3
"""Exit code of a failed file operation; its standard error holds the reason."""

_MAX_ACCOUNT_FILE_BYTES: Final = 1 << 20
_COPY_BYTES: Final = 1 << 18
PRELOADED: Final = frozenset({"errno", "json", "os", "re", "stat", "sys", "time"})
"""Modules that a program in a fork of the launcher may import; no library folder is visible there."""
_HANDLED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SMALL_BYTES: Final = 1 << 20
_FEW_FILES: Final = 1000


class _Account(NamedTuple):
    user_id: int
    group_id: int
    groups: tuple[int, ...]
    name: str
    home: str


class Limits(NamedTuple):
    """Limits of one sandbox that are set inside it."""

    processes: int
    open_files: int
    layer_bytes: int
    shared_memory_bytes: int
    single_id: bool
    """True if commands of every user run with the only id that exists."""


class FileProblem(Exception):
    """A file cannot be read or written; the message is the reason, in one line."""


def find_account(user: str, passwd: str, group: str) -> _Account:
    """Resolve a name or `uid[:gid]` using the contents of the sandbox's own passwd and group files. `root` is always 0,
    because an image may lack the entry. Raises FileProblem."""
    if user == "root":
        return _Account(0, 0, (0,), "root", "/root")
    for line in passwd.splitlines():
        fields = line.split(":")
        if len(fields) >= 6 and fields[0] == user and fields[2].isdigit() and fields[3].isdigit():
            group_id = int(fields[3])
            rows = (row.split(":") for row in group.splitlines())
            named = [row for row in rows if len(row) >= 4 and row[2].isdigit() and user in row[3].split(",")]
            groups = (group_id, *(int(row[2]) for row in named))
            return _Account(int(fields[2]), group_id, groups, user, fields[5] or "/")
    user_part, _, group_part = user.partition(":")
    if user_part.isdigit() and (group_part or user_part).isdigit():
        group_id = int(group_part or user_part)
        return _Account(int(user_part), group_id, (group_id,), user_part, "/")
    raise FileProblem(f"user {user!r} is not in the sandbox's /etc/passwd")


def read_account_file(path: str) -> str:
    """Return the text of /etc/passwd or /etc/group. Raises FileProblem (no regular file, or too large), OSError."""
    return _read_regular(path, _MAX_ACCOUNT_FILE_BYTES).decode(errors="replace")


def account_file(path: str) -> str:
    """Return the text of /etc/passwd or /etc/group, or "" if it cannot be read."""
    try:
        return read_account_file(path)
    except (FileProblem, OSError):
        return ""


def become(user: str, limits: Limits) -> _Account:
    """Switch to the user's ids. Root keeps the few capabilities that the sandbox's init has; other users have none."""
    # Most commands run as root, who is the same in every image.
    texts = ("", "") if user == "root" else (account_file("/etc/passwd"), account_file("/etc/group"))
    account = find_account(user, *texts)
    if limits.single_id:
        return account
    os.setgroups(account.groups)
    os.setresgid(account.group_id, account.group_id, account.group_id)
    os.setresuid(account.user_id, account.user_id, account.user_id)
    return account


def _apply_limits(limits: Limits) -> None:
    # After the change of user: a limit that is already reached must not make the kernel refuse the execve.
    files, processes = (resource.RLIMIT_NOFILE, limits.open_files), (resource.RLIMIT_NPROC, limits.processes)
    for kind, value in ((resource.RLIMIT_CORE, 0), files, processes):
        _, hard = resource.getrlimit(kind)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))


def fail(message: str, status: int) -> NoReturn:
    with suppress(OSError):
        os.write(2, message.encode(errors="replace")[:4096] + b"\n")
    os._exit(status)


def run_command(message: dict[str, Any], limits: Limits, image: Image) -> NoReturn:
    """Become the command: a string is run with `bash -c`, and a list is a program and its arguments. An invalid user,
    folder or program ends the process with status 126 and a line on standard error."""
    try:
        os.setsid()
        syscalls.become_subreaper()
        account = become(str(message["user"]), limits)
        size = message.get("terminal")
        if size is not None:
            _open_terminal(int(size[0]), int(size[1]))
        _apply_limits(limits)
        environment = {
            "PATH": SEARCH_PATH,
            "HOME": account.home,
            "USER": account.name,
            "LOGNAME": account.name,
            "LANG": "C.UTF-8",
            **({} if size is None else {"TERM": "xterm-256color"}),
            **image.environment,
            **message["env"],
        }
        if message["cwd"] is not None:
            os.chdir(message["cwd"])
        else:
            try:
                os.chdir(image.folder)
            except OSError:
                os.chdir("/")
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            # Python ignores these two, and ignored signals survive execve.
            signal.signal(number, signal.SIG_DFL)
        command = message["command"]
        if isinstance(command, str):
            os.execve("/bin/bash", ["bash", "-c", command], environment)
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError, OverflowError, FileProblem) as error:
        fail(f"cannot run the command: {error}", EXIT_CANNOT_RUN)


def run_program(message: dict[str, Any], limits: Limits) -> NoReturn:
    """Run a Python program in this process. No interpreter has to start, and the image need not have one. The program
    may import the modules that the launcher has already imported (`PRELOADED`). It exits like a Python script: with the
    status of SystemExit, or with 1 and a traceback. An invalid user ends it with status 126."""
    try:
        os.setsid()
        syscalls.become_subreaper()
        account = become(str(message["user"]), limits)
        _apply_limits(limits)
        os.environ.clear()
        os.environ.update(PATH=SEARCH_PATH, HOME=account.home, USER=account.name, LANG="C.UTF-8")
        os.chdir("/")
        code = compile(message["program"], "<program>", "exec", dont_inherit=True)
        arguments = [str(argument) for argument in message["arguments"]]
    except (OSError, ValueError, SyntaxError, FileProblem) as error:
        fail(f"cannot run the program: {error}", EXIT_CANNOT_RUN)
    gc.enable()
    sys.argv = ["-c", *arguments]
    sys.path.clear()
    for number in _HANDLED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    sys.stdin, sys.stdout = open(0, encoding="utf-8"), open(1, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    module = sys.modules["__main__"] = type(sys)("__main__")
    status = 1
    try:
        exec(code, module.__dict__)
        status = 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            status = (end.code or 0) & 0xFF
        else:
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - any other exception ends the program with a traceback
        sys.__excepthook__(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _open_terminal(rows: int, columns: int) -> None:
    """Open a terminal, send its master end through the socket on standard input, and become its foreground session."""
    master, slave = os.openpty()
    set_terminal_size(slave, rows, columns)
    with socket.socket(fileno=os.dup(0)) as client:
        socket.send_fds(client, [b"t"], [master])
    os.close(master)
    for number in (0, 1, 2):
        os.dup2(slave, number)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    if slave > 2:
        os.close(slave)


def set_terminal_size(terminal: int, rows: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def _regular(descriptor: int, path: str) -> os.stat_result:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise FileProblem(f"{path}: not a regular file")
    return status


def _read_regular(path: str, max_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        if (size := _regular(descriptor, path).st_size) > max_bytes:
            raise FileProblem(f"{path}: has {size} bytes, more than max_bytes={max_bytes}")
        parts = []
        while max_bytes > 0 and (part := os.read(descriptor, min(_COPY_BYTES, max_bytes))):
            parts.append(part)
            max_bytes -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_file(message: dict[str, Any], limits: Limits) -> NoReturn:
    """Copy one regular file to standard output."""
    try:
        become(str(message["user"]), limits)
        data = memoryview(_read_regular(message["path"], int(message["max_bytes"])))
        while data:
            data = data[os.write(1, data) :]
    except (OSError, ValueError, OverflowError, FileProblem) as error:
        fail(_describe(error), EXIT_FILE_ERROR)
    os._exit(0)


def write_files(message: dict[str, Any], limits: Limits) -> NoReturn:
    """Write files, given as (path, size) pairs; standard input holds their contents, one after another."""
    try:
        become(str(message["user"]), limits)
        os.umask(0o022)
        for path, size in message["files"]:
            _write_regular(path, int(size))
    except (OSError, ValueError, OverflowError, FileProblem) as error:
        fail(_describe(error), EXIT_FILE_ERROR)
    os._exit(0)


def is_small_write(message: dict[str, Any], source: int) -> bool:
    """Return True for a write as root whose contents are complete and small, which needs no change of user."""
    files, status = message.get("files"), os.fstat(source)
    is_few = isinstance(files, list) and len(files) <= _FEW_FILES and status.st_size <= _SMALL_BYTES
    return is_few and message.get("user") == "root" and stat.S_ISREG(status.st_mode)


def write_now(message: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    """Do the work of `write_files` in this process and return the exit code and the cost in CPU time; errors go to
    standard error."""
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    source, _, error_output = descriptors
    exit_code = 0
    try:
        for path, size in message["files"]:
            _write_regular(path, int(size), source)
    except (OSError, ValueError, OverflowError, TypeError, AttributeError, FileProblem) as error:
        # No value in a request may end the first process.
        exit_code = EXIT_FILE_ERROR
        with suppress(OSError):
            os.write(error_output, _describe(error).encode(errors="replace")[:4096] + b"\n")
    cost = ("write", time.process_time() - began_cpu_s)
    return {"exit_code": exit_code, "duration_s": time.monotonic() - began_s, "cost": cost}


def _write_regular(path: str, size: int, source: int = 0) -> None:
    if not path.startswith("/"):
        raise FileProblem(f"{path}: not an absolute path")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        _regular(descriptor, path)
        os.ftruncate(descriptor, 0)
        while size > 0:
            part = memoryview(os.read(source, min(_COPY_BYTES, size)))
            if not part:
                raise FileProblem(f"{path}: the contents ended before the given size")
            size -= len(part)
            while part:
                part = part[os.write(descriptor, part) :]
    finally:
        os.close(descriptor)


def _describe(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)
