# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""`sudo` in a sandbox, where set-user-id programs have no effect: the first process runs the command.

The program (`guest.SUDO_SCRIPT`) connects and sends its pid. Everything else is taken from that process: its arguments
and working folder from /proc, its open files through the launcher, which alone may duplicate them (pidfd_getfd(2)).

Invariants:
- The process that is named must hold the other end of the connection, so nobody can ask in the name of another's
  process. It must belong to root, to the sandbox's own user, or to a member of the groups `sudo` and `wheel`.
- The first process reads nothing of the caller but one line; what a caller chose is read in the child that becomes the
  command.
- The command ends with the connection, and so with the program that asked for it.
- An option that would change what runs is served or refused by name; those about passwords have no effect, because
  nobody is asked for one.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple, NoReturn

from headrace.sandboxes.launcher import commands
from headrace.sandboxes.launcher.commands import Limits
from headrace.sandboxes.launcher.guest import SUDO_ADDRESS, USER_ID
from headrace.sandboxes.launcher.wire import Channel, Message, close_all
from headrace.sandboxes.linux import syscalls
from headrace.sandboxes.linux.rootfs import Image

# ruff: noqa: PTH123
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)


_LENT: Final = (4, 5, 6, 3)
"""Descriptors of the caller: copies of its three standard streams, and its end of the connection."""
_MAX_CONNECTIONS: Final = 32
_MAX_LINE_BYTES: Final = 32
_MAX_TEXT_BYTES: Final = 4 << 20
_PID_DESCRIPTOR: Final = 3
_GROUPS: Final = ("sudo", "wheel")
_EXIT_REFUSED: Final = 1
_KEPT: Final = frozenset(("TERM", "COLORTERM", "LANG", "LANGUAGE", "TZ", "DISPLAY"))
"""Variables of the caller that the command gets without `-E`."""
_OPTIONS: Final = {
    "A": "askpass",
    "b": "background",
    "D": "chdir",
    "E": "preserve-env",
    "e": "edit",
    "g": "group",
    "H": "set-home",
    "h": "help",
    "i": "login",
    "K": "remove-timestamp",
    "k": "reset-timestamp",
    "l": "list",
    "n": "non-interactive",
    "P": "preserve-groups",
    "p": "prompt",
    "S": "stdin",
    "s": "shell",
    "T": "command-timeout",
    "u": "user",
    "V": "version",
    "v": "validate",
}
"""Options of sudo(8) by their letter."""
_WITH_VALUE: Final = frozenset("DgpTu")
_UNSUPPORTED: Final = "begT"
_INFORMING: Final = {
    "h": "",
    "V": "sudo of a headrace sandbox",
    "l": "(ALL : ALL) NOPASSWD: ALL",
    "v": "",
    "k": "",
    "K": "",
}
"""Options that need no command, and what they print."""
_USAGE: Final = "usage: sudo [-EHins] [-u user] [-D folder] [VARIABLE=value] command"


class _Asking:
    """One connection. `pid` is 0 until the caller has sent it."""

    __slots__ = ("connection", "pid", "pid_descriptor", "stop")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.pid = 0
        self.pid_descriptor = -1
        self.stop: Callable[[], None] | None = None
        """Ends the running command."""


class SudoRequests:
    """The part of process 1 that accepts requests. `start(message, descriptors, answer)` starts a command and returns
    the function that ends it."""

    def __init__(
        self,
        channel: Channel,
        start: Callable[[Message, Sequence[int], Callable[[Message], None]], Callable[[], None]],
    ) -> None:
        self._channel = channel
        self._start = start
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._listener.bind(SUDO_ADDRESS)
        self._listener.listen(_MAX_CONNECTIONS)
        self._asking: dict[int, _Asking] = {}
        self._tickets: dict[int, _Asking] = {}
        self._last_ticket = 0

    def register(self, poll: select.poll) -> None:
        """Register what `take` has to be called for."""
        if len(self._asking) < _MAX_CONNECTIONS or any(not asking.pid for asking in self._asking.values()):
            poll.register(self._listener.fileno(), select.POLLIN)
        for descriptor in self._asking:
            poll.register(descriptor, select.POLLIN)

    def take(self) -> None:
        """Accept connections, read pids, and end the commands of connections that are closed. Raises ChannelClosed."""
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._asking) >= _MAX_CONNECTIONS:
                # Nobody can keep others out by opening connections and sending nothing.
                silent = next((asking for asking in self._asking.values() if not asking.pid), None)
                if silent is not None:
                    self._drop(silent)
            if len(self._asking) < _MAX_CONNECTIONS:
                self._asking[connection.fileno()] = _Asking(connection)
            else:
                connection.close()
        for asking in list(self._asking.values()):
            try:
                data = asking.connection.recv(_MAX_LINE_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if asking.pid or not data.endswith(b"\n") or not data[:-1].isdigit():
                self._drop(asking)
            else:
                self._ask_launcher(asking, int(data))

    def _ask_launcher(self, asking: _Asking, pid: int) -> None:
        try:
            asking.pid_descriptor = os.pidfd_open(pid)
        except (OSError, OverflowError):
            self._drop(asking)
            return
        asking.pid = pid
        self._last_ticket += 1
        self._tickets[self._last_ticket] = asking
        self._channel.send({"event": "borrow", "ticket": self._last_ticket}, (os.dup(asking.pid_descriptor),))

    def lend(self, message: Message, descriptors: list[int]) -> None:
        """Start the command of a caller whose descriptors the launcher has duplicated."""
        asking = self._tickets.pop(int(message["ticket"]), None)
        if asking is None or asking.connection.fileno() < 0:
            return
        if "error" in message:
            self._answer(asking, str(message["error"]))
            return
        with socket.socket(fileno=os.dup(descriptors[-1])) as theirs:
            try:
                same = theirs.getsockname() == asking.connection.getpeername()
                same = same and theirs.getpeername() == asking.connection.getsockname()
            except OSError:
                same = False
        if not same:
            self._answer(asking, f"process {asking.pid} did not ask for this")
            return
        order = {"op": "sudo", "pid": asking.pid, "timeout_s": None}
        asking.stop = self._start(
            order,
            (*descriptors[:-1], asking.pid_descriptor),
            lambda result: self._answer(asking, str(result["exit_code"])),
        )

    def _answer(self, asking: _Asking, text: str) -> None:
        asking.stop = None
        with suppress(OSError):
            asking.connection.send(f"{text}\n".encode(errors="replace"))
        self._drop(asking)

    def _drop(self, asking: _Asking) -> None:
        stop, asking.stop = asking.stop, None
        self._asking.pop(asking.connection.fileno(), None)
        asking.connection.close()
        if asking.pid_descriptor >= 0:
            os.close(asking.pid_descriptor)
            asking.pid_descriptor = -1
        if stop is not None:
            stop()


def lend_descriptors(channel: Channel, message: Message, descriptors: list[int]) -> None:
    """Answer a first process that borrows the descriptors of a process in its sandbox; the launcher's part. A stream
    that is closed there is replaced by /dev/null."""
    ticket, lent = int(message["ticket"]), []
    try:
        for number in _LENT:
            try:
                lent.append(syscalls.duplicate_of(descriptors[0], number))
            except OSError as error:
                if number == _LENT[-1] or error.errno != errno.EBADF:
                    raise
                lent.append(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC))
    except (OSError, IndexError) as error:
        close_all(lent)
        channel.send({"op": "lent", "ticket": ticket, "error": f"this host cannot lend the caller's files: {error}"})
    else:
        channel.send({"op": "lent", "ticket": ticket}, lent)
    finally:
        close_all(descriptors)


def run_sudo(message: dict[str, Any], limits: Limits, image: Image) -> NoReturn:
    """Become the command that the process `message["pid"]` asks for. Standard streams are the caller's, and descriptor
    3 refers to its process. A refusal ends this process with status 1 and a line on standard error."""
    try:
        pid = int(message["pid"])
        status = _text(f"/proc/{pid}/status").splitlines()
        rows = dict(row.partition(":")[::2] for row in status)
        ids = {name: [int(word) for word in rows[name].split()] for name in ("Uid", "Gid", "Groups")}
        user_id, group_id = ids["Uid"][0], ids["Gid"][0]
        caller = _check_caller(user_id, {group_id, *ids["Groups"]})
        # The kernel shows the environment and the folder of a process to its own user.
        os.setegid(group_id)
        os.seteuid(user_id)
        arguments = _text(f"/proc/{pid}/cmdline").split("\0")[:-1]
        variables = dict(row.partition("=")[::2] for row in _text(f"/proc/{pid}/environ").split("\0") if row)
        folder = os.open(f"/proc/{pid}/cwd", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        os.seteuid(0)
        os.setegid(0)
        alive = select.poll()
        alive.register(_PID_DESCRIPTOR, select.POLLIN)
        if alive.poll(0):
            # Its number may belong to another process by now.
            raise SudoRefused("the calling process has ended")
        os.close(_PID_DESCRIPTOR)
        # "/bin/bash", "-p", path of the script, arguments
        order = parse_sudo(arguments[3:])
        os.fchdir(folder)
        os.close(folder)
    except (OSError, ValueError, LookupError, SudoRefused) as error:
        commands.fail(f"sudo: {error}", _EXIT_REFUSED)
    env = {name: value for name, value in variables.items() if order.kept is None or name in order.kept}
    for name in ("HOME", "USER", "LOGNAME", "PATH"):
        env.pop(name, None)
    env |= {
        "SUDO_USER": caller,
        "SUDO_UID": str(user_id),
        "SUDO_GID": str(group_id),
        "SUDO_COMMAND": " ".join(order.command),
        **order.env,
    }
    started = {"command": order.command, "user": order.user, "env": env, "cwd": order.folder or "."}
    commands.run_command(started, limits, image)


def _check_caller(user_id: int, group_ids: set[int]) -> str:
    """Return the caller's name. Raises SudoRefused."""
    users = [row.split(":") for row in commands.account_file("/etc/passwd").splitlines()]
    name = next((row[0] for row in users if len(row) > 2 and row[2] == str(user_id)), str(user_id))
    if user_id in (0, USER_ID):
        return name
    for row in (row.split(":") for row in commands.account_file("/etc/group").splitlines()):
        if len(row) > 3 and row[0] in _GROUPS and (row[2] in map(str, group_ids) or name in row[3].split(",")):
            return name
    raise SudoRefused(f"{name} is neither this sandbox's user nor in the group sudo")


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read(_MAX_TEXT_BYTES)


class SudoRefused(Exception):
    """The command is not run; the message is the reason."""


class SudoOrder(NamedTuple):
    """A parsed command line. `kept` names the caller's variables to keep, or is None for all of them."""

    command: list[str]
    user: str
    folder: str | None
    kept: frozenset[str] | None
    env: dict[str, str]


def parse_sudo(arguments: Sequence[str]) -> SudoOrder:
    """Parse the arguments of sudo (sudo(8)). Raises SudoRefused."""
    given, rest = parse_options(arguments)
    for letter in _UNSUPPORTED:
        if letter in given:
            raise SudoRefused(f"-{letter} (--{_OPTIONS[letter]}) is not supported in this sandbox; {_USAGE}")
    env: dict[str, str] = {}
    while rest and "=" in rest[0].lstrip("=") and not rest[0].startswith("/"):
        name, _, value = rest.pop(0).partition("=")
        env[name] = value
    informing = next((letter for letter in _INFORMING if letter in given), "")
    if rest:
        pass
    elif informing:
        text = _USAGE if informing == "h" else _INFORMING[informing]
        rest = ["/bin/bash", "-c", 'test -z "$1" || echo "$1"', "sudo", text]
    elif "i" not in given and "s" not in given:
        raise SudoRefused(_USAGE)
    if "i" in given or "s" in given:
        rest = ["/bin/bash", *(["-l"] if "i" in given else []), *(["-c", 'exec "$@"', "sudo", *rest] if rest else [])]
    if "i" in given:
        rest = ["/bin/bash", "-c", 'cd; exec "$@"', "sudo", *rest]
    kept = _KEPT | frozenset(given.get("E", "").split(","))
    return SudoOrder(
        command=rest,
        user=given.get("u", "root").removeprefix("#"),
        folder=given.get("D"),
        kept=None if given.get("E") == "" else kept,
        env=env,
    )


def parse_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options by their letter, with their values, and the words after them. Raises SudoRefused."""
    letters = {name: letter for letter, name in _OPTIONS.items()}
    given: dict[str, str] = {}
    words = list(arguments)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            letter, more = letters.get(name, "-"), ""
        else:
            equals, value, letter, more = "", "", word[1], word[2:]
        while letter:
            if letter not in _OPTIONS:
                break
            if letter in _WITH_VALUE and not equals:
                if not more and not words:
                    raise SudoRefused(f"{word} needs a value; {_USAGE}")
                value, more = (more or words.pop(0)), ""
            given[letter] = value
            letter, more = more[:1], more[1:]
        else:
            continue
        raise SudoRefused(f"unknown option {word}; {_USAGE}")
    return given, words
