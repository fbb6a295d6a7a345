"""Runs the tests as an unprivileged user, and records the pytest reports where that user cannot alter them.

Runs as root; its argument is the path of a JSON file with its settings.
Invariants:
- Only this program writes to standard output: the tests write to pipes that it reads and caps.
- The report arrives through a socket that only the pytest process and the shell that starts it hold. Each pytest
  session receives a key and the names of its canaries when it starts, before any of the repository's code runs; records
  without a known key are ignored.
- The kernel identifies the sender of each record. Only descendants of the command can start a session, and descendants
  of a process that has already started one cannot. Code under test therefore cannot add a session, and an attempt to do
  so invalidates the report.
- After the command has ended, all remaining processes of its user are killed before the output is printed, so that no
  daemon can add to it.
- The tests and their settings are owned by root and are in folders where nobody else can move them.
"""

from __future__ import annotations

import json
import os
import pwd
import secrets
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
from typing import Any

NO_USER = 20
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_LINE_BYTES, MAX_SESSIONS = 1 << 16, 1000
CREDENTIALS = struct.Struct("3i")
SETTINGS = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml")


class Drain(threading.Thread):
    """Thread that reads a pipe until EOF and keeps the first bytes."""

    def __init__(self, descriptor: int, max_bytes: int) -> None:
        super().__init__(daemon=True)
        self.descriptor, self.left = descriptor, max_bytes
        self.pieces: list[bytes] = []
        self.start()

    def run(self) -> None:
        piece = b"."
        while piece:
            piece = os.read(self.descriptor, 1 << 16)
            if self.left:
                self.pieces.append(piece[: self.left])
                self.left -= len(self.pieces[-1])


class _Sessions(threading.Thread):
    """Thread that sends each new session its secrets, and keeps the session's records up to a size limit."""

    def __init__(self, channel: socket.socket, given: dict[str, Any], command: int) -> None:
        super().__init__(daemon=True)
        self.command = command
        self.channel, self.left = channel, given["max_report_bytes"]
        self.told = [given["twins"], given["uncollected"]]
        self.sessions: dict[str, dict[str, Any]] = {}
        self.began: set[int] = set()
        self.intruded = False
        self.start()

    def run(self) -> None:
        rest: dict[int, bytes] = {}
        space = socket.CMSG_SPACE(CREDENTIALS.size)
        while True:
            data, extra, _, _ = self.channel.recvmsg(1 << 16, space)
            if not data:
                return
            self.left -= len(data)
            if self.left < 0:
                continue
            sender = CREDENTIALS.unpack(extra[0][2][: CREDENTIALS.size])[0] if extra else 0
            *lines, rest[sender] = (rest.get(sender, b"") + data).split(b"\n")
            if len(rest[sender]) > MAX_LINE_BYTES:
                del rest[sender]
            for line in lines:
                try:
                    self.take(json.loads(line), sender)
                except (ValueError, AttributeError, TypeError, RecursionError, OSError):
                    continue

    def take(self, record: dict[str, Any], sender: int) -> None:
        if record.get("event") == "start":
            line = ancestry(sender)
            self.intruded |= self.command not in line or not self.began.isdisjoint(line)
            if len(self.sessions) >= MAX_SESSIONS or self.intruded:
                # Otherwise the session would wait for an answer forever.
                self.channel.shutdown(socket.SHUT_WR)
                return
            self.began.add(sender)
            key, *names = (secrets.token_hex(8) for _ in range(3))
            self.sessions[key] = {"must_pass": names[0], "must_fail": names[1], "ended": False, "records": []}
            self.channel.sendall(json.dumps([key, *names, *self.told]).encode() + b"\n")
            return
        session = self.sessions.get(str(record.pop("key", "")))
        if session is not None and not session["ended"]:
            session["ended"] = record.get("event") == "end"
            session["records"].append([str(record.get(name, "")) for name in ("event", "id", "result")])


def ancestry(process: int) -> list[int]:
    """Return a process and those of its ancestors that still exist."""
    line = []
    while process > 1:
        line.append(process)
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                process = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, ValueError):
            return line
    return line


def give(workdir: str, owner: pwd.struct_passwd, protected: list[str]) -> None:
    """Give ownership of the tree to its user, except for the tests and all of their parent folders, which root owns."""
    tests = list(protected)
    for folder, folders, files in os.walk(workdir):
        for name in (*folders, *files):
            os.lchown(os.path.join(folder, name), owner.pw_uid, owner.pw_gid)
        tests += [os.path.join(folder, name) for name in files if name in SETTINGS or name.startswith("test_")]
    shut(workdir)
    for path in tests:
        parts = path[len(workdir) :].strip("/").split("/")
        for position in range(1, len(parts) + 1):
            shut("/".join((workdir, *parts[:position])))


def shut(path: str) -> None:
    """Give ownership of a path to root. Other users can create entries in such a folder, but cannot remove root's
    entries (sticky bit)."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        os.lchown(path, 0, 0)
        os.chmod(path, 0o1777 if stat.S_ISDIR(mode) else 0o755 if mode & stat.S_IXUSR else 0o644)


def become(owner: pwd.struct_passwd) -> None:
    os.setgroups([])
    os.setgid(owner.pw_gid)
    os.setuid(owner.pw_uid)


def end_all(owner: pwd.struct_passwd) -> None:
    """Kill every process of a user, unless that user is root."""
    if owner.pw_uid == 0 or os.getuid() != 0:
        return
    child = os.fork()
    if child == 0:
        become(owner)
        try:
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def run(given: dict[str, Any], owner: pwd.struct_passwd) -> dict[str, Any]:
    pipes = [os.pipe() for _ in range(2)]
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    environment = {"PATH": SEARCH_PATH, "HOME": owner.pw_dir, "USER": owner.pw_name, "LANG": "C.UTF-8"}
    environment.update(given["environment"])
    environment["HEADRACE_REPORT"] = str(theirs.fileno())
    drop = (lambda: become(owner)) if os.getuid() == 0 and owner.pw_uid != 0 else None
    process = subprocess.Popen(
        given["command"],
        cwd=given["workdir"],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pipes[0][1],
        stderr=pipes[1][1],
        pass_fds=[theirs.fileno()],
        preexec_fn=drop,
        start_new_session=True,
    )
    theirs.close()
    for _, write_end in pipes:
        os.close(write_end)
    drains = [Drain(pipe[0], given["max_log_bytes"]) for pipe in pipes]
    sessions = _Sessions(ours, given, process.pid)
    cut = False
    try:
        code = process.wait(given["deadline_s"])
    except subprocess.TimeoutExpired:
        cut = True
        process.kill()
        code = process.wait()
    end_all(owner)
    for thread in (*drains, sessions):
        thread.join(2.0)
    stdout, stderr = (b"".join(drain.pieces).decode("utf-8", "replace") for drain in drains)
    return {
        "exit_code": code,
        "stdout": stdout,
        "stderr": stderr,
        "sessions": list(sessions.sessions.values()),
        "intruded": sessions.intruded,
        "cut": cut,
    }


def main(path: str) -> None:
    with open(path, encoding="utf-8") as file:
        given = json.load(file)
    os.unlink(path)
    try:
        owner = pwd.getpwnam(given["user"])
    except KeyError:
        sys.exit(NO_USER)
    end_all(owner)
    if owner.pw_uid != 0 and os.getuid() == 0:
        give(given["workdir"], owner, given["protected"])
    json.dump(run(given, owner), sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
