"""A Debian or Ubuntu root file system made here, from the mirror that this host itself installs from.

Invariants: everything happens in a mount namespace of its own, so that no mount of the installation stays on the host;
the result holds no device nodes.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.sandboxes.errors import BootFailed, ImageRefused
from headrace.sandboxes.kernel import syscalls

if TYPE_CHECKING:
    from collections.abc import Iterable

SUITE: Final = re.compile(r"[a-z][a-z0-9.-]{0,40}")
_SOURCES: Final = Path("/etc/apt")
_MESSAGE_CHARACTERS: Final = 2000


def install(suite: str, tree: Path) -> int:
    """Install the minimal system with bash into an empty folder. Returns its size in bytes.

    Raises ImageRefused (no debootstrap on this host, no such suite), BootFailed (the mirror does not answer).
    """
    program = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if program is None:
        raise ImageRefused("debootstrap is not installed on this host: apt-get install debootstrap")
    syscalls.unshare(syscalls.CLONE_NEWNS)
    syscalls.mount("none", "/", flags=syscalls.MS_REC | syscalls.MS_PRIVATE)
    command = [program, "--variant=minbase", suite, str(tree)]
    mirror = mirror_for(suite, _source_texts())
    done = subprocess.run(
        command + ([mirror] if mirror else []), capture_output=True, check=False, env={**os.environ, **_proxies()}
    )
    if done.returncode != 0:
        said = (done.stdout + done.stderr)[-_MESSAGE_CHARACTERS:].decode(errors="replace").strip()
        kind = ImageRefused if "No such script" in said else BootFailed
        raise kind(f"debootstrap {suite} from {mirror or 'its own mirror'} failed: {said}")
    return _drop_devices(tree)


def mirror_for(suite: str, sources: Iterable[str]) -> str | None:
    """The first mirror of `suite`, else of any suite of the same kind, in the texts of apt's source files (both forms
    of sources.list(5)). Mirrors of security updates hold no whole suite."""
    entries = [entry for text in sources for entry in _entries(text)]
    whole = [(uri, suites) for uri, suites in entries if "security" not in uri]
    exact = [uri for uri, suites in whole if suite in suites]
    return next(iter(exact or [uri for uri, _ in whole]), None)


def _entries(text: str) -> list[tuple[str, list[str]]]:
    """(address, suites) of each source of packages."""
    found = []
    for line in text.splitlines():
        words = re.sub(r"\[.*?\]", "", line).split()
        if len(words) >= 3 and words[0] == "deb":
            found.append((words[1], [words[2]]))
    for paragraph in re.split(r"\n\s*\n", text):
        fields = dict(re.findall(r"^([A-Za-z-]+):[ \t]*(.*)$", paragraph, re.MULTILINE))
        if "deb" in fields.get("Types", "").split():
            found += [(uri, fields.get("Suites", "").split()) for uri in fields.get("URIs", "").split()]
    return [(uri, suites) for uri, suites in found if uri.startswith(("http://", "https://", "file:"))]


def _source_texts() -> list[str]:
    folder = _SOURCES / "sources.list.d"
    paths = [_SOURCES / "sources.list", *sorted(folder.glob("*.list")), *sorted(folder.glob("*.sources"))]
    return [path.read_text(errors="replace") for path in paths if path.is_file()]


def _proxies() -> dict[str, str]:
    """apt's own proxy settings, in the words of the download program that debootstrap uses."""
    found = {}
    for scheme in ("http", "https"):
        command = ("apt-config", "shell", "PROXY", f"Acquire::{scheme}::Proxy")
        done = subprocess.run(command, capture_output=True, check=False, text=True)
        if match := re.fullmatch(r"PROXY='([^']+)'\n?", done.stdout):
            found[f"{scheme}_proxy"] = match[1]
    return found


def _drop_devices(tree: Path) -> int:
    total = 0
    for folder, _, names in os.walk(tree):
        for name in names:
            path = Path(folder) / name
            status = path.lstat()
            total += 4096 + (status.st_size if stat.S_ISREG(status.st_mode) else 0)
            if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode) or stat.S_ISFIFO(status.st_mode):
                path.unlink()
    return total
