"""The image `host` for containers: this host's programs, read-only, with generated configuration files.

Invariants: only programs and libraries of the host are visible; there are three fixed accounts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

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
    """Return the folders of the host that are mounted unchanged."""
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
