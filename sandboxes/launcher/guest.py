# ruff: noqa: PTH103, PTH108, PTH120
# (The launcher does not import pathlib: every forked sandbox would pay for its memory.)
"""What a sandbox for E2B's clients has in addition to its image: an account, files, and the program `sudo`.

Invariants:
- The first process adds it when it has given up the host's rights, and before any command runs: a link in the image
  leads nowhere but into the sandbox.
- An account or a home folder that the image has is kept; nothing but `sudo` is replaced.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final, NamedTuple

from headrace.sandboxes.launcher.commands import FileProblem, read_account_file

SUDO_PATH: Final = "/usr/bin/sudo"
SUDO_ADDRESS: Final = ("127.0.0.2", 49982)
"""Where the first process accepts requests of `sudo`: an address of the sandbox's own loopback interface that its
programs do not use."""
SUDO_SCRIPT: Final = rf"""#!/bin/bash -p
# Asks the first process of this sandbox to run a command as root: set-user-id programs have no effect here. That
# process takes the arguments and the working folder from this one, and its open files: 3 is the connection, and 4 to 6
# are the standard streams, which the shell itself redirects for a moment when it writes.
exec 4<&- 5>&- 6>&-
[ -e /dev/fd/0 ] && exec 4<&0
[ -e /dev/fd/1 ] && exec 5>&1
[ -e /dev/fd/2 ] && exec 6>&2
if ! {{ exec 3<> /dev/tcp/{SUDO_ADDRESS[0]}/{SUDO_ADDRESS[1]}; }} 2> /dev/null; then
    echo "sudo: refused by the policy of this sandbox" >&2
    exit 1
fi
echo "$$" >&3
IFS= read -r -u 3 answer || answer="the sandbox closed the connection"
case $answer in
    [0-9]*) exit "$answer" ;;
esac
printf 'sudo: %s\n' "$answer" >&2
exit 1
"""
USER_ID: Final = 1000


class GuestProblem(Exception):
    """The image cannot take the account; the message is the reason."""


class GuestFiles(NamedTuple):
    """Additions to a sandbox. `files` are (absolute path, text) pairs, readable by every user."""

    user: str
    sudo: bool
    files: tuple[tuple[str, str], ...]


def add_guest(guest: GuestFiles, *, shows_host: bool, single_id: bool) -> None:
    """Add the account, the files and, unless /usr is the host's, the program `sudo`. Raises GuestProblem, OSError."""
    home = f"/home/{guest.user}"
    # The password field is not `x`: no other file of accounts is asked about this user.
    rows = _add_row("/etc/passwd", [guest.user, "*", str(USER_ID), str(USER_ID), guest.user, home, "/bin/bash"])
    _add_row("/etc/group", [guest.user, "x", str(USER_ID), ""])
    known = next(row for row in rows if row[0] == guest.user)
    if len(known) > 5 and known[5].startswith("/"):
        home = known[5]
    if not os.path.lexists(home):
        os.makedirs(home, 0o755)
        if not single_id:
            os.chown(home, USER_ID, USER_ID)
    for path, text in guest.files:
        _replace(path, text, 0o644)
    if not shows_host:
        _replace(SUDO_PATH, SUDO_SCRIPT, 0o755)


def _add_row(path: str, fields: list[str]) -> list[list[str]]:
    """Add a row unless there is one of that name, and return all rows. The new row is the first one of its id, whose
    name programs then show."""
    rows = [row.split(":") for row in _read(path).splitlines()]
    if not any(row[0] == fields[0] for row in rows):
        same_id = (place for place, row in enumerate(rows) if len(row) > 2 and row[2] == fields[2])
        rows.insert(next(same_id, len(rows)), fields)
        _write(path, "".join(":".join(row) + "\n" for row in rows).encode(), os.O_CREAT | os.O_TRUNC, 0o644)
    return rows


def _read(path: str) -> str:
    try:
        return read_account_file(path)
    except FileNotFoundError:
        return ""
    except FileProblem as error:
        raise GuestProblem(f"the image's {error}") from error
    except OSError as error:
        raise GuestProblem(f"{path} of the image: {error.strerror}") from error


def _replace(path: str, text: str, mode: int) -> None:
    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
    with suppress(FileNotFoundError):
        os.unlink(path)
    _write(path, text.encode(), os.O_CREAT | os.O_EXCL, mode)


def _write(path: str, data: bytes, flags: int, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, mode)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
