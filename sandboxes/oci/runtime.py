"""Command lines of an OCI runtime: runc, or runsc (gVisor).

Invariants:
- A provider starts only if the program is installed; every call has a timeout and a minimal environment; the runtime's
  state is in the provider's own folder, so that no other tool lists or changes it.
- Of the host, only programs and libraries are visible; there are three fixed accounts.
"""

from __future__ import annotations

import asyncio
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from headrace.sandboxes.errors import NamespacesUnavailable

_SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CALL_TIMEOUT_S: Final = 30.0


HOST_IMAGE: Final = "host"
_SYSTEM: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_AGENT_ID: Final = 1000
_FOLDERS: Final = {
    "etc/alternatives": 0o755,
    "etc": 0o755,
    "root": 0o700,
    "home/agent": 0o755,
    "home": 0o755,
    "workspace": 0o777,
    "tmp": 0o1777,
    "var/tmp": 0o1777,
    "run": 0o755,
    "opt": 0o755,
    "mnt": 0o755,
    "srv": 0o755,
    "usr": 0o755,
    "dev": 0o755,
    "proc": 0o555,
}
_FILES: Final = {
    "etc/passwd": f"root:x:0:0:root:/root:/bin/bash\nagent:x:{_AGENT_ID}:{_AGENT_ID}:agent:/home/agent:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": f"root:x:0:\ntty:x:5:\nagent:x:{_AGENT_ID}:\nnogroup:x:65534:\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": "sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
    "etc/resolv.conf": "",
}


def system_folders() -> list[str]:
    """Return the host folders that are mounted unchanged."""
    own = [f"/{name}" for name in _SYSTEM if Path(f"/{name}").is_dir() and not Path(f"/{name}").is_symlink()]
    return ["/usr", *own]


def host_skeleton() -> dict[str, Any]:
    """Return {folders: name to mode, links: name to target, files: name to text, owners: name to id inside}."""
    links = {name: str(Path(f"/{name}").readlink()) for name in _SYSTEM if Path(f"/{name}").is_symlink()}
    alternatives = Path("/etc/alternatives")
    if alternatives.is_dir():
        # Debian's /usr/bin/awk and many others lead through these into /usr.
        found = {entry.name: str(entry.readlink()) for entry in alternatives.iterdir() if entry.is_symlink()}
        links |= {f"etc/alternatives/{name}": target for name, target in found.items() if target.startswith("/usr/")}
    folders = {**_FOLDERS, **{path[1:]: 0o755 for path in system_folders()}}
    return {"folders": folders, "links": links, "files": _FILES, "owners": {"home/agent": _AGENT_ID}}


class RuntimeKind(StrEnum):
    """Program that runs the containers."""

    RUNC = "runc"
    """Namespaces and cgroups of this kernel."""
    RUNSC = "runsc"
    """gVisor, a user-space kernel: slower, but with the strongest isolation of all providers."""


_GLOBAL: Final = {
    RuntimeKind.RUNC: (),
    RuntimeKind.RUNSC: ("--platform=ptrace", "--network=none", "--host-uds=none", "--overlay2=none"),
}


class OciRuntime:
    """One runtime with its state in the folder `state`. Raises NamespacesUnavailable if it is not installed."""

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
