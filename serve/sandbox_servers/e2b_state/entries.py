"""File metadata: a pure parser of `find -printf` output, and the conversion to envd's JSON form.

A record consists of `FIELDS` values, each terminated by a NUL, so that no file name can be confused with another field.

Invariants:
- Paths are treated as strings here; a process run as the user resolves them inside the sandbox, where the kernel
  handles `..`. An unknown user is looked up again each time, because an agent may add that user.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any, Final

from headrace.sandboxes.base import Sandbox
from headrace.sandboxes.launcher.commands import EXIT_CANNOT_RUN
from headrace.serve.sandbox_servers.e2b_state.bodies import timestamp
from headrace.serve.sandbox_servers.e2b_state.errors import Code, RpcError

FORMAT: Final = r"%i\0%y\0%Y\0%s\0%m\0%M\0%u\0%g\0%T@\0%l\0%p\0"
"""inode, type, type behind links, size, mode, permissions, owner, group, modified, link target, path (find(1))."""
FIELDS: Final = 11
_TYPES: Final = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY"}
_DANGLING: Final = "FILE_TYPE_SYMLINK"


_TIMEOUT_S: Final = 30.0
_HOME_SCRIPT: Final = 'printf %s "$HOME"; [ -d "$HOME" ]'
MAX_PATH_BYTES: Final = 4095


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user in a sandbox. `folder` is the working folder of the user's commands: the home folder, or `/` if that is
    missing."""

    name: str
    home: str
    folder: str

    def resolve(self, path: str) -> str:
        """Return an absolute path. Raises RpcError."""
        if "\0" in path:
            raise RpcError(Code.INVALID_ARGUMENT, "a path must not contain a NUL byte")
        if len(path.encode(errors="surrogatepass")) > MAX_PATH_BYTES:
            raise RpcError(Code.INVALID_ARGUMENT, f"the path is longer than {MAX_PATH_BYTES} bytes")
        if path == "~" or path.startswith("~/"):
            return posixpath.normpath(posixpath.join(self.home, path[2:]))
        if path.startswith("~"):
            raise RpcError(Code.INVALID_ARGUMENT, f"{path}: cannot expand user-specific home dir")
        if path.startswith("/"):
            return path
        return posixpath.normpath(posixpath.join(self.home, path))


class Accounts:
    """Cache of the users of one sandbox. `default` is the user of requests that name none (the SDKs omit it from envd
    0.4.0 on)."""

    def __init__(self, sandbox: Sandbox, default_user: str = "") -> None:
        self._sandbox = sandbox
        self._default_user = default_user or "root"
        self._known: dict[str, Account] = {}

    async def find(self, name: str) -> Account:
        """Look up a user. Raises RpcError (the user is unknown), SandboxError."""
        name = name or self._default_user
        if (known := self._known.get(name)) is not None:
            return known
        result = await self._sandbox.exec(_HOME_SCRIPT, user=name, cwd="/", timeout_s=_TIMEOUT_S)
        if result.exit_code == EXIT_CANNOT_RUN:
            raise RpcError(Code.UNAUTHENTICATED, f"invalid username: {name!r}")
        home = result.stdout.decode(errors="replace") or "/"
        account = Account(name=name, home=home, folder=home if result.exit_code == 0 else "/")
        self._known[name] = account
        return account


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """A file, folder or link. `modified_at` is in Unix seconds."""

    inode: int
    kind: str
    target_kind: str
    """The kind of a link's target; `N` if it does not exist, `L` for a loop."""
    size_bytes: int
    mode: int
    permissions: str
    owner: str
    group: str
    modified_at: float
    target: str
    path: str

    def to_json(self) -> dict[str, Any]:
        """Return filesystem.EntryInfo in the protobuf JSON mapping."""
        document: dict[str, Any] = {
            "name": posixpath.basename(self.path.rstrip("/")) or "/",
            "type": _TYPES.get(self.target_kind, _DANGLING if self.kind == "l" else "FILE_TYPE_UNSPECIFIED"),
            "path": self.path,
            "size": str(self.size_bytes),
            "mode": self.mode,
            "permissions": self.permissions,
            "owner": self.owner,
            "group": self.group,
            "modifiedTime": timestamp(self.modified_at),
        }
        if self.kind == "l":
            # Newer SDKs use this mark; older ones omit entries with the type of a link.
            document |= {"isSymlink": True, "symlinkTarget": self.target}
        return document


def parse_entries(output: bytes) -> list[FileEntry]:
    """Parse complete records of `find -printf FORMAT`, and return them sorted by path, in the order of a lexical walk.
    Raises ValueError."""
    values = output.decode(errors="replace").split("\0")
    entries = []
    for start in range(0, len(values) - FIELDS, FIELDS):
        inode, kind, target_kind, size, mode, permissions, owner, group, modified, target, path = values[
            start : start + FIELDS
        ]
        entry = FileEntry(
            inode=int(inode),
            kind=kind,
            target_kind=target_kind,
            size_bytes=int(size),
            mode=int(mode, 8) & 0o7777,
            permissions=permissions,
            owner=owner,
            group=group,
            modified_at=float(modified),
            target=target,
            path=path,
        )
        entries.append(entry)
    return sorted(entries, key=lambda entry: entry.path.split("/"))
