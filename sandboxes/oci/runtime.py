"""Command lines of an OCI runtime: runc, or runsc (gVisor).

Invariants: a provider starts only if the program is installed; every call has a timeout and a minimal environment; the
runtime's state is in the provider's own folder, so that no other tool lists or changes it.
"""

from __future__ import annotations

import asyncio
import shutil
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import NamespacesUnavailable

if TYPE_CHECKING:
    from pathlib import Path

_SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CALL_TIMEOUT_S: Final = 30.0


class RuntimeKind(StrEnum):
    """Program that runs the containers."""

    RUNC = "runc"
    """Namespaces and cgroups of this kernel."""
    RUNSC = "runsc"
    """gVisor, a kernel in user space: slower, with the strongest isolation of all providers."""


_GLOBAL: Final = {
    RuntimeKind.RUNC: (),
    RuntimeKind.RUNSC: ("--platform=ptrace", "--network=none", "--host-uds=none", "--overlay2=none"),
}


class OciRuntime:
    """One runtime with its state in the folder `state`. Raises NamespacesUnavailable when it is not installed."""

    def __init__(self, kind: RuntimeKind, state: Path) -> None:
        program = shutil.which(kind, path=_SEARCH_PATH)
        if program is None:
            raise NamespacesUnavailable(f"no {kind} on this host: apt-get install {kind}")
        self.kind = kind
        self.program = program
        self._state = state

    def command(self, *words: str) -> list[str]:
        """Return the command line for a subcommand of the runtime."""
        return [self.program, "--root", str(self._state), *_GLOBAL[self.kind], *words]

    async def call(self, *words: str) -> bool:
        """Run a short command and return whether it succeeded. Its output is discarded."""
        process = await asyncio.create_subprocess_exec(
            *self.command(*words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": _SEARCH_PATH},
        )
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await process.wait() == 0
        except TimeoutError:
            return False
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
