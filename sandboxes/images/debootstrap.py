"""Installation of a Debian or Ubuntu root file system from the mirror that this host's own packages come from.

Invariants: everything happens in a separate mount namespace, so that no mount made by the installation remains on the
host. The result contains no device nodes.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from headrace.sandboxes.errors import BootFailed, ImageRefused
from headrace.sandboxes.host.child_environment import child_environment
from headrace.sandboxes.linux import syscalls

SUITE: Final = re.compile(r"[a-z][a-z0-9.-]{0,40}(\+[a-z0-9][a-z0-9.+-]{0,80}(,[a-z0-9][a-z0-9.+-]{0,80}){0,99})?")
"""A suite and, after a plus sign, additional packages."""
_SOURCES: Final = Path("/etc/apt")
_MESSAGE_CHARACTERS: Final = 2000


def install(suite: str, tree: Path) -> int:
    """Install the minimal system with bash and the packages of `suite` (as `SUITE` has it) into an empty folder and
    return its size in bytes. Raises ImageRefused (no debootstrap on this host, no such suite), BootFailed (the mirror
    does not respond)."""
    suite, _, packages = suite.partition("+")
    program = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise ImageRefused("debootstrap is not installed on this host: apt-get install debootstrap")
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    folder = _SOURCES / "sources.list.d"
    paths = [_SOURCES / "sources.list", *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]
    mirror = mirror_for(suite, [path.read_text(errors="replace") for path in paths if path.is_file()])
    # The download program of debootstrap does not read apt's proxy settings.
    environment = child_environment()
    for scheme in ("http", "https"):
        ask = ("apt-config", "shell", "PROXY", f"Acquire::{scheme}::Proxy")
        answer = subprocess.run(ask, capture_output=True, check=False, text=True, env=child_environment()).stdout
        if match := re.fullmatch(r"PROXY='([^']+)'\n?", answer):
            environment[f"{scheme}_proxy"] = match[1]
    include = [f"--include={packages}"] if packages else []
    command = [program, "--variant=minbase", *include, suite, str(tree), *([mirror] if mirror else [])]
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    if done.returncode != 0:
        output = (done.stdout + done.stderr)[-_MESSAGE_CHARACTERS:].decode(errors="replace").strip()
        kind = ImageRefused if "No such script" in output else BootFailed
        raise kind(f"debootstrap {suite} from {mirror or 'its default mirror'} failed: {output}")
    total = 0
    for parent, _, names in os.walk(tree):
        for name in names:
            path = Path(parent) / name
            status = path.lstat()
            total += 4096 + (status.st_size if stat.S_ISREG(status.st_mode) else 0)
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode) or stat.S_ISFIFO(status.st_mode):
                path.unlink()
    return total


def mirror_for(suite: str, sources: Iterable[str]) -> str | None:
    """Return the first mirror of `suite` (failing that, of any suite) found in the contents of apt's source files. Both
    forms of sources.list(5) are read. Mirrors for security updates are skipped, because they do not hold a complete
    suite."""
    found: list[tuple[str, list[str]]] = []
    for text in sources:
        for line in text.splitlines():
            words = re.sub(r"\[.*?\]", "", line).split()
            if len(words) >= 3 and words[0] == "deb":
                found.append((words[1], [words[2]]))
        for paragraph in re.split(r"\n\s*\n", text):
            fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", paragraph, re.MULTILINE))
            if "deb" in fields.get("Types", "").split():
                found += [(uri, fields.get("Suites", "").split()) for uri in fields.get("URIs", "").split()]
    complete = [
        (uri, suites)
        for uri, suites in found
        if uri.startswith(("http://", "https://", "file:")) and "security" not in uri
    ]
    exact = [uri for uri, suites in complete if suite in suites]
    return next(iter(exact or [uri for uri, _ in complete]), None)
