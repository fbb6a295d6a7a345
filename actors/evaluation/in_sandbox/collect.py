"""Prints the difference between a pristine tree and an agent's tree, as a diff computed by git.

Runs as root in a clean sandbox; its argument is JSON (see `evaluation.patch_collection`). Invariants:
- Nothing from the agent is trusted: its `.git` is never opened, its attributes, ignore rules and filters are not read,
  no link in its tree is followed, and git sees only blobs and trees that this program has written to its own
  repository.
- Files that are not regular or that exceed a cap are noted, but are not in the diff.

Standard output: one line of JSON ({"notes": [[path, reason]], "settings": {path: hex}}), then the diff.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
import zlib

TOO_MUCH, TOO_LONG = 3, 5
CACHES = {b"__pycache__", b".pytest_cache", b".mypy_cache", b".ruff_cache", b".hypothesis", b".git"}
SETTINGS = (b"pyproject.toml", b"setup.cfg")
GIT = ["git", "-c", "core.quotePath=true", "-c", "core.fileMode=true", "-c", "diff.suppressBlankEmpty=false"]
CLEAN = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_DEFAULT_HASH": "sha1",
    "LC_ALL": "C",
}

Entry = tuple[int, int]


def walk(top: bytes, max_entries: int) -> dict[bytes, Entry]:
    """Return the (mode, size) of all files by relative path, excluding caches and anything named .git."""
    found = {}
    folders = [b""]
    while folders:
        folder = folders.pop()
        for entry in os.scandir(os.path.join(top, folder) if folder else top):
            if entry.name in CACHES or entry.name.endswith(b".pyc"):
                continue
            status = entry.stat(follow_symlinks=False)
            path = os.path.join(folder, entry.name)
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)
            else:
                found[path] = (status.st_mode, status.st_size)
            if len(found) + len(folders) > max_entries:
                sys.exit(TOO_MUCH)
    return found


def same(first: bytes, second: bytes) -> bool:
    with open(first, "rb") as one, open(second, "rb") as other:
        while True:
            piece = one.read(1 << 16)
            if piece != other.read(1 << 16):
                return False
            if not piece:
                return True


def changed(base: bytes, left: bytes, before: dict[bytes, Entry], after: dict[bytes, Entry]) -> list[bytes]:
    """Return the paths whose type, executable bit or content differs; changes to existing files come first."""
    paths = []
    for path in sorted(before.keys() | after.keys(), key=lambda path: (path not in before, path)):
        one, other = before.get(path), after.get(path)
        if one is None or other is None or stat.S_IFMT(one[0]) != stat.S_IFMT(other[0]):
            paths.append(path)
        elif stat.S_ISLNK(one[0]):
            if os.readlink(os.path.join(base, path)) != os.readlink(os.path.join(left, path)):
                paths.append(path)
        elif stat.S_ISREG(one[0]) and (
            (one[0] ^ other[0]) & stat.S_IXUSR
            or one[1] != other[1]
            or not same(os.path.join(base, path), os.path.join(left, path))
        ):
            paths.append(path)
    return paths


def ignored(base: bytes, before: dict[bytes, Entry], paths: list[bytes]) -> list[bytes]:
    """Return the new paths that the pristine repository ignores."""
    # Git stops at the first path below one of its links, and takes a name that starts with a colon for a pattern.
    links = tuple(path + b"/" for path, (mode, _) in before.items() if stat.S_ISLNK(mode))
    paths = [b"./" + path for path in paths if path not in before and not path.startswith(links)]
    if not paths or not os.path.exists(os.path.join(base, b".git")):
        return []
    command = [*GIT, "-c", "safe.directory=*", "check-ignore", "-z", "--stdin", "--no-index"]
    answer = subprocess.run(command, cwd=base, input=b"\0".join(paths) + b"\0", stdout=subprocess.PIPE, env=CLEAN)
    return [path[2:] for path in answer.stdout.split(b"\0")]


def drop_reason(path: bytes, entries: list[Entry], max_bytes: int) -> str:
    """Return the reason why a path is not in the diff; empty if it is."""
    if any(stat.S_ISLNK(mode) for mode, _ in entries):
        return "symbolic link"
    if not all(stat.S_ISREG(mode) for mode, _ in entries):
        return "no regular file"
    return "over the size cap" if any(size > max_bytes for _, size in entries) else ""


def store(folder: str, kind: bytes, content: bytes) -> bytes:
    """Write a loose object to a repository, and return its name as 20 bytes."""
    data = b"%s %d\0%s" % (kind, len(content), content)
    digest = hashlib.sha1(data)
    name = digest.hexdigest()
    path = os.path.join(folder, "objects", name[:2], name[2:])
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(zlib.compress(data, 1))
    return digest.digest()


def tree(folder: str, top: bytes, entries: dict[bytes, Entry], paths: list[bytes]) -> str:
    """Write a tree of those `paths` that exist, and return its object name."""
    # Written here and not by `git update-index`, which refuses names such as `.GIT` and `git~1`.
    rows: dict[bytes, dict[bytes, bytes]] = {b"": {}}
    for path in (path for path in paths if path in entries):
        with open(os.path.join(top, path), "rb") as file:
            blob = store(folder, b"blob", file.read())
        mode = b"100755" if entries[path][0] & stat.S_IXUSR else b"100644"
        parent, _, name = path.rpartition(b"/")
        rows.setdefault(parent, {})[name] = b"%s %s\0%s" % (mode, name, blob)
        while parent:
            parent = parent.rpartition(b"/")[0]
            rows.setdefault(parent, {})
    for path in sorted(rows, key=len, reverse=True):
        # Git sorts a folder as if its name ended with a slash.
        content = b"".join(row for _, row in sorted(rows[path].items()))
        named = store(folder, b"tree", content)
        if path:
            parent, _, name = path.rpartition(b"/")
            rows[parent][name + b"/"] = b"40000 %s\0%s" % (name, named)
    return named.hex()


def main(base: bytes, left: bytes, max_entries: int, max_files: int, max_bytes: int) -> None:
    before, after = walk(base, max_entries), walk(left, max_entries)
    paths = changed(base, left, before, after)
    hidden = set(ignored(base, before, paths))
    notes: list[list[str]] = []
    kept: list[bytes] = []
    for path in (path for path in paths if path not in hidden):
        reason = drop_reason(path, [side[path] for side in (before, after) if path in side], max_bytes)
        if reason or len(kept) >= max_files:
            notes.append([path.decode("utf-8", "backslashreplace"), reason or "over the size cap"])
        else:
            kept.append(path)
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(CLEAN, GIT_DIR=folder)
        subprocess.run([*GIT, "init", "-q", "--bare", "--template=", folder], check=True, env=environment)
        trees = [tree(folder, base, before, kept), tree(folder, left, after, kept)]
        options = ["-r", "-p", "--full-index", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color"]
        command = [*GIT, "diff-tree", *options, "--src-prefix=a/", "--dst-prefix=b/", *trees]
        diff = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd="/", env=environment).stdout
    settings = {}
    for path in kept:
        if path.rsplit(b"/", 1)[-1] in SETTINGS and path in before:
            with open(os.path.join(base, path), "rb") as file:
                settings[path.decode("utf-8", "surrogateescape")] = file.read().hex()
    header = {"notes": notes[:1000], "settings": settings}
    sys.stdout.buffer.write(json.dumps(header).encode() + b"\n" + diff)


if __name__ == "__main__":
    try:
        given = json.loads(sys.argv[1])
        main(os.fsencode(given["base"]), os.fsencode(given["left"]), *given["caps"])
    except OSError as error:
        sys.exit(TOO_LONG if error.errno == 36 else repr(error))
