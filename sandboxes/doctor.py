"""Which guarantees the local sandboxes of this machine give, and which are missing and why.

Invariants: a guarantee is present only because the kernel was seen to give it just now; what is not built says so.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Final

from headrace.sandboxes.errors import NamespacesUnavailable
from headrace.sandboxes.kernel.host_limits import RESERVED_PROCESSES, HostLimits, default_live, share
from headrace.sandboxes.kernel.stdlib_process import stdlib_command
from headrace.sandboxes.local.provider import LocalSandboxConfig

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
    answer = _ask_kernel()
    reasons = {**answer.reasons, **_program_reasons()}
    found = [
        Guarantee(name=name, present=not reasons[name], detail=reasons[name] or meaning, required=name not in _OPTIONAL)
        for name, meaning in _MEANING.items()
    ]
    missing = [
        Guarantee(name=name, present=False, detail=detail, required=False) for name, detail in _NOT_BUILT.items()
    ]
    return (*found, *_sums(answer), *missing)


def require_namespaces() -> None:
    """Raises NamespacesUnavailable with every required guarantee that is missing."""
    missing = [guarantee for guarantee in probe() if guarantee.required and not guarantee.present]
    if missing:
        raise NamespacesUnavailable("; ".join(f"{guarantee.name}: {guarantee.detail}" for guarantee in missing))


@dataclass(frozen=True, slots=True)
class _Answer:
    reasons: dict[str, str]
    host: HostLimits | None = None
    allowed: HostLimits | None = None


def _sums(answer: _Answer) -> list[Guarantee]:
    """What sandboxes with the default limits can take together, beside what they may."""
    if answer.allowed is None or answer.host is None:
        return []
    allowed, host, config = answer.allowed, answer.host, LocalSandboxConfig()
    sandboxes = config.max_live or default_live(allowed)
    one = share(allowed, sandboxes, config.pids, config.open_files)
    processes, open_files = one.of_all(sandboxes)
    of_group = "" if not answer.reasons["cgroup memory"] else "no limit: " + answer.reasons["cgroup memory"]
    memory = (
        f"{sandboxes} sandboxes x {_gib(config.memory_bytes or 0)} = {_gib(sandboxes * (config.memory_bytes or 0))}; "
        f"all together are kept below {_gib(allowed.memory_bytes)} of {_gib(host.memory_bytes)}"
    )
    taken = f"{sandboxes} sandboxes x ({one.processes} + {RESERVED_PROCESSES}) = {processes} of {allowed.processes}"
    opened = f"{processes} processes x {one.open_files} = {open_files} of {allowed.open_files}"
    fewer = "lower sandbox.local.max_live"
    rows = (
        ("all memory", not of_group, memory, of_group),
        ("all processes", processes <= allowed.processes, f"{taken} (kernel.pid_max {host.processes})", fewer),
        (
            "all descriptors",
            open_files <= allowed.open_files,
            f"{opened} (fs.file-max {host.open_files})",
            f"raise fs.file-max or {fewer}",
        ),
    )
    return [
        Guarantee(name=name, present=fits, detail=text if fits else f"{text}; {fix}", required=False)
        for name, fits, text, fix in rows
    ]


def _gib(amount_bytes: int) -> str:
    return f"{amount_bytes / (1 << 30):.1f} GiB"


def _ask_kernel() -> _Answer:
    names = [name for name in _MEANING if name not in ("bash", "python3")]
    try:
        completed = subprocess.run(
            stdlib_command("launcher.probe"), capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True, cwd="/", env={}
        )
        document = json.loads(completed.stdout)
        reasons = {name: str(document["reasons"].get(name, "not probed")) for name in names}
        return _Answer(reasons, HostLimits(*document["host"]), HostLimits(*document["allowed"]))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return _Answer(dict.fromkeys(names, f"the probe itself failed: {error}"))


def _program_reasons() -> dict[str, str]:
    reasons: dict[str, str] = {}
    for name, path in (("bash", "/bin/bash"), ("python3", "/usr/bin/python3")):
        try:
            subprocess.run((path, "--version"), capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True)
            reasons[name] = ""
        except (OSError, subprocess.SubprocessError) as error:
            reasons[name] = str(error)
    return reasons
