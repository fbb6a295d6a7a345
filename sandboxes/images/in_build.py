"""Program that image builds run as root inside their sandboxes: users, folders and copies of build contexts.

It runs in a fork of the launcher (`ProgramRunner`), so that the image needs no tools. Standard input: a JSON list of
operations. Standard output: a JSON object with `homes` (the home folder of each user), or `failed` (the number of the
operation) and `message`.

Invariants: every path is resolved inside the sandbox, whose links cannot lead out of it. The program imports only what
`launcher.commands.PRELOADED` allows.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from typing import Any

CONTEXT = "/.headrace-context"
"""Folder in which the layer of a build context is shown; it is never part of an image."""
GLOB = re.compile(r"[*?\[]")
_CHUNK_BYTES = 1 << 20
_USER = ("user", "user:x:1000:1000::/home/user:/bin/bash\n", "user:x:1000:\n")


class OperationRefused(Exception):
    """An operation that cannot be done; the message is for the builder of the image."""


def rows(path: str) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return []


def find_id(name: str, path: str, kind: str) -> int:
    if name.isdigit():
        return int(name)
    for fields in rows(path):
        if len(fields) >= 3 and fields[0] == name and fields[2].isdigit():
            return int(fields[2])
    if name == "root":
        return 0
    raise OperationRefused(f"{kind} {name!r} is not in the image's {path}")


def group_of(user: str) -> int:
    for fields in rows("/etc/passwd"):
        if len(fields) >= 4 and user in (fields[0], fields[2]) and fields[3].isdigit():
            return int(fields[3])
    return find_id(user, "/etc/passwd", "user")


def ids(owner: str) -> tuple[int, int]:
    user, _, group = owner.partition(":")
    number = find_id(user, "/etc/passwd", "user")
    return number, find_id(group, "/etc/group", "group") if group and group != user else group_of(user)


def ensure_user(name: str, create: bool) -> str:
    """Check that a user exists, and create E2B's user if it does not. Return the home folder."""
    if create and name == _USER[0] and not any(fields[0] == name for fields in rows("/etc/passwd")):
        for path, line in (("/etc/passwd", _USER[1]), ("/etc/group", _USER[2])):
            if path == "/etc/passwd" or not any(fields[0] == name for fields in rows(path)):
                with open(path, "a", encoding="utf-8") as file:
                    file.write(line)
        if not os.path.isdir("/home/user"):
            os.makedirs("/home/user", exist_ok=True)
            os.chown("/home/user", 1000, 1000)
    find_id(name.partition(":")[0], "/etc/passwd", "user")
    for fields in rows("/etc/passwd"):
        if len(fields) >= 6 and fields[0] == name:
            return fields[5] or "/"
    return "/root" if name == "root" else "/"


def make_folder(path: str, owner: tuple[int, int]) -> None:
    """Make a folder with its parents; what is new belongs to `owner`."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_folder(parent, owner)
    os.mkdir(path, 0o755)
    os.chown(path, *owner)


def copy(source: str, target: str, workdir: str, owner: tuple[int, int], mode: int | None) -> None:
    """Copy a file, or the contents of a folder, from the build context, as COPY does."""
    ends_in_folder = target.endswith("/")
    target = os.path.normpath(os.path.join(workdir or "/", target))
    parts = [part for part in source.split("/") if part not in ("", ".")]
    has_glob = any(GLOB.search(part) for part in parts)
    if has_glob:
        # The context holds only what matched; everything below the part before the pattern is copied.
        parts = parts[: next(number for number, part in enumerate(parts) if GLOB.search(part))]
    path = os.path.join(CONTEXT, *parts)
    try:
        status = os.lstat(path)
    except OSError as error:
        raise OperationRefused(f"{source!r} is not in the build context") from error
    if stat.S_ISDIR(status.st_mode):
        make_folder(target, owner)
        waiting = [(path, target)]
        while waiting:
            below, into = waiting.pop()
            for entry in os.scandir(below):
                copied = os.path.join(into, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    if not os.path.isdir(copied):
                        os.mkdir(copied, 0o755)
                    os.chown(copied, *owner)
                    os.chmod(copied, entry.stat(follow_symlinks=False).st_mode & 0o7777 if mode is None else mode)
                    waiting.append((entry.path, copied))
                else:
                    copy_file(entry.path, copied, owner, mode)
        return
    if ends_in_folder or os.path.isdir(target):
        make_folder(target, owner)
        target = os.path.join(target, os.path.basename(path))
    else:
        make_folder(os.path.dirname(target), owner)
    copy_file(path, target, owner, mode)


def copy_file(source: str, target: str, owner: tuple[int, int], mode: int | None) -> None:
    status = os.lstat(source)
    if os.path.isdir(target) and not os.path.islink(target):
        raise OperationRefused(f"{target!r} is a folder in the image, and a file in the build context")
    if os.path.lexists(target):
        os.unlink(target)
    if stat.S_ISLNK(status.st_mode):
        os.symlink(os.readlink(source), target)
        os.chown(target, *owner, follow_symlinks=False)
        return
    with open(source, "rb") as reading:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as writing:
            while data := reading.read(_CHUNK_BYTES):
                writing.write(data)
            os.fchown(descriptor, *owner)
            os.fchmod(descriptor, status.st_mode & 0o7777 if mode is None else mode)
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))


def run(operations: list[dict[str, Any]]) -> dict[str, Any]:
    homes: dict[str, str] = {}
    for number, operation in enumerate(operations):
        try:
            match operation["op"]:
                case "user":
                    homes[operation["name"]] = ensure_user(operation["name"], operation["create"])
                case "folder":
                    make_folder(os.path.normpath(operation["path"]), ids(operation["user"]))
                case "copy":
                    copied = (operation["source"], operation["target"], operation["workdir"])
                    copy(*copied, ids(operation["owner"]), operation["mode"])
        except (OperationRefused, OSError, RecursionError) as error:
            return {"failed": number, "message": str(error)}
    return {"homes": homes}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.stdin.read()))))
