"""Users of a sandbox and their paths: as in envd, `~` and relative paths start at the user's home.

Invariants: paths are only text here; a process of the user resolves them inside the sandbox, where the kernel handles
`..`. An unknown user is looked up again each time, because an agent may add it.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.launcher.commands import EXIT_CANNOT_RUN
from headrace.serve.e2b_sandboxes.errors import Code, RpcError

if TYPE_CHECKING:
    from headrace.sandboxes.base import Sandbox

DEFAULT_USER: Final = "root"
"""User of requests without one (the SDKs omit it from envd 0.4.0 on)."""
_TIMEOUT_S: Final = 30.0
_HOME_SCRIPT: Final = 'printf %s "$HOME"; [ -d "$HOME" ]'
MAX_PATH_BYTES: Final = 4095


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A user of a sandbox. `folder` is the working folder of its commands: its home, or `/` if that is missing."""

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
    """Cache of the users of one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._known: dict[str, Account] = {}

    async def find(self, name: str) -> Account:
        """Look up a user. Raises RpcError (unknown user), SandboxError."""
        name = name or DEFAULT_USER
        if (known := self._known.get(name)) is not None:
            return known
        result = await self._sandbox.exec(_HOME_SCRIPT, user=name, cwd="/", timeout_s=_TIMEOUT_S)
        if result.exit_code == EXIT_CANNOT_RUN:
            raise RpcError(Code.UNAUTHENTICATED, f"invalid username: {name!r}")
        home = result.stdout.decode(errors="replace") or "/"
        account = Account(name=name, home=home, folder=home if result.exit_code == 0 else "/")
        self._known[name] = account
        return account
