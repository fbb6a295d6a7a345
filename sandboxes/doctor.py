"""Which guarantees the local sandboxes of this machine give, and which are missing and why.

Invariants: a guarantee is present only because the kernel was seen to give it just now; what is not built says so.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Final

from headrace.sandboxes.errors import NamespacesUnavailable
from headrace.sandboxes.launcher.stdlib_process import stdlib_command

_PROBE_TIMEOUT_S: Final = 30.0

_MEANING: Final = {
    "user namespace": "root inside is nobody outside",
    "mount namespace": "an own file tree; the host's is not there",
    "pid namespace": "other processes cannot be seen; killing process 1 kills all",
    "network namespace": "an own loopback and no way out",
    "ipc namespace": "no shared memory or queues with others",
    "uts namespace": "an own host name",
    "id range": "65536 user ids of its own for each sandbox",
    "private root": "tmpfs root, read-only /usr, few devices, pivot_root; size of the file layer is capped",
    "link-safe paths": "frozen data is found without following links (openat2)",
    "dropped capabilities": "seven harmless ones are kept for root inside; no nested user namespaces",
    "no new privileges": "set-user-id programs give nothing",
    "call filter": "seccomp: no vsock, io_uring, bpf, perf, keyrings, userfaultfd; native programs only",
    "cgroup memory": "memory of a sandbox with its files; only what takes too much is killed",
    "cgroup cpu": "processors of a sandbox",
    "cgroup pids": "processes of a sandbox, in all",
    "cgroup freezer": "pause and resume",
    "images and snapshots": "overlayfs above layers shown with the sandbox's ids (mapped mounts): no copies",
    "death with the owner": "pidfd and parent-death signal: nothing outlives the pool",
    "bash": "/bin/bash runs the commands",
    "python3": "/usr/bin/python3 for tasks and checks written in Python",
}
_OPTIONAL: Final = (
    "python3",
    "id range",
    "call filter",
    "images and snapshots",
    "cgroup memory",
    "cgroup cpu",
    "cgroup pids",
    "cgroup freezer",
)
_NOT_BUILT: Final = {
    "escaped daemons at a timeout": "a process that left its command's tree while another command runs in its "
    "sandbox ends with the sandbox, not with the timeout: there is no group for each command",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """One line of `headrace doctor`. `detail` is what it means, or why it is missing."""

    name: str
    present: bool
    detail: str
    required: bool
    """Without it the local provider does not start."""


def probe() -> tuple[Guarantee, ...]:
    """Try everything in a child process (about 0.1 s). Never raises for what the machine lacks."""
    reasons = {**_kernel_reasons(), **_program_reasons()}
    found = [
        Guarantee(name=name, present=not reasons[name], detail=reasons[name] or meaning, required=name not in _OPTIONAL)
        for name, meaning in _MEANING.items()
    ]
    missing = [
        Guarantee(name=name, present=False, detail=detail, required=False) for name, detail in _NOT_BUILT.items()
    ]
    return (*found, *missing)


def require_namespaces() -> None:
    """Raises NamespacesUnavailable with every required guarantee that is missing."""
    missing = [guarantee for guarantee in probe() if guarantee.required and not guarantee.present]
    if missing:
        raise NamespacesUnavailable("; ".join(f"{guarantee.name}: {guarantee.detail}" for guarantee in missing))


def _kernel_reasons() -> dict[str, str]:
    names = [name for name in _MEANING if name not in ("bash", "python3")]
    try:
        completed = subprocess.run(
            stdlib_command("launcher.probe"), capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True, cwd="/", env={}
        )
        reasons = json.loads(completed.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return dict.fromkeys(names, f"the probe itself failed: {error}")
    return {name: str(reasons.get(name, "not probed")) for name in names}


def _program_reasons() -> dict[str, str]:
    reasons: dict[str, str] = {}
    for name, path in (("bash", "/bin/bash"), ("python3", "/usr/bin/python3")):
        try:
            subprocess.run((path, "--version"), capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True)
            reasons[name] = ""
        except (OSError, subprocess.SubprocessError) as error:
            reasons[name] = str(error)
    return reasons
