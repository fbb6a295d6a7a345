"""Report of the guarantees that local sandboxes have on this machine, and the reason for each one that is missing.

Invariants: a guarantee is reported as present only if the kernel was just observed to provide it; a feature that is not
implemented is reported as such.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from typing import Final

from headrace.sandboxes.errors import NamespacesUnavailable
from headrace.sandboxes.images.store import default_image_folder
from headrace.sandboxes.linux.host_limits import HostLimits, default_live, share
from headrace.sandboxes.linux.stdlib_process import stdlib_command
from headrace.sandboxes.local.provider import LocalSandboxConfig

_PROBE_TIMEOUT_S: Final = 30.0

_MEANING: Final = {
    "user namespace": "root inside has no privileges outside",
    "mount namespace": "separate file tree; the host's files are not visible",
    "pid namespace": "other processes are not visible; killing process 1 kills all",
    "network namespace": "separate loopback and no access to any network",
    "ipc namespace": "no shared memory or queues with other sandboxes",
    "uts namespace": "separate host name",
    "id range": "65536 user ids of its own for each sandbox",
    "private root": "tmpfs root, read-only /usr, few devices, pivot_root; limited size of the file layer",
    "link-safe paths": "frozen data is opened without following links (openat2)",
    "dropped capabilities": "root inside has only seven harmless ones; no nested user namespaces",
    "no new privileges": "set-user-id programs give no privileges",
    "call filter": "seccomp: no vsock, io_uring, bpf, perf, keyrings, userfaultfd; native programs only",
    "cgroup memory": "memory limit of a sandbox and its files; only commands that exceed it are killed",
    "cgroup cpu": "processor limit of a sandbox",
    "cgroup pids": "limit of all processes of a sandbox",
    "cgroup freezer": "pause and resume",
    "images": "overlayfs above layers shown with the sandbox's ids (idmapped mounts of the image folder): no copies",
    "snapshots": "the same for layers in memory; with layers_in, those on that disk count",
    "death with the owner": "pidfd and parent-death signal: no sandbox outlives the pool",
    "bash": "/bin/bash runs the commands",
    "python3": "/usr/bin/python3 for tasks and checks written in Python",
}
_OPTIONAL: Final = (
    "python3",
    "id range",
    "call filter",
    "images",
    "snapshots",
    "cgroup memory",
    "cgroup cpu",
    "cgroup pids",
    "cgroup freezer",
)
_NOT_BUILT: Final = {
    "escaped daemons at a timeout": "a process that left its command's tree while another command runs in its "
    "sandbox ends with the sandbox, not with the timeout: there is no control group for each command"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """One line of `headrace doctor`. `detail` states what the guarantee means, or why it is missing."""

    name: str
    present: bool
    detail: str
    required: bool
    """True if the local provider does not start without it."""


def probe() -> tuple[Guarantee, ...]:
    """Test each guarantee in a child process (about 0.1 s). A missing guarantee never raises an error."""
    programs = {"bash": "/bin/bash", "python3": "/usr/bin/python3"}
    reasons: dict[str, str] = dict.fromkeys(_MEANING, "not probed")
    sums: list[Guarantee] = []
    command = (*stdlib_command("launcher.probe"), str(default_image_folder()))
    try:
        completed = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True, cwd="/", env={})
        document = json.loads(completed.stdout)
        reasons |= {name: str(document["reasons"][name]) for name in _MEANING if name in document["reasons"]}
        memory_reason = reasons["cgroup memory"]
        counts_processes = not reasons["cgroup pids"]
        sums = _sums(HostLimits(*document["host"]), HostLimits(*document["allowed"]), memory_reason, counts_processes)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reasons = dict.fromkeys(_MEANING, f"the probe itself failed: {error}")
    for name, path in programs.items():
        try:
            subprocess.run((path, "--version"), capture_output=True, timeout=_PROBE_TIMEOUT_S, check=True, env={})
            reasons[name] = ""
        except (OSError, subprocess.SubprocessError) as error:
            reasons[name] = str(error)
    found = [
        Guarantee(name=name, present=not reasons[name], detail=reasons[name] or meaning, required=name not in _OPTIONAL)
        for name, meaning in _MEANING.items()
    ]
    missing = [
        Guarantee(name=name, present=False, detail=detail, required=False) for name, detail in _NOT_BUILT.items()
    ]
    return (*found, *sums, *missing)


def require_namespaces() -> None:
    """Check that no required guarantee is missing. Raises NamespacesUnavailable, which lists all missing ones."""
    missing = [guarantee for guarantee in probe() if guarantee.required and not guarantee.present]
    if missing:
        raise NamespacesUnavailable("; ".join(f"{guarantee.name}: {guarantee.detail}" for guarantee in missing))


def _sums(host: HostLimits, allowed: HostLimits, no_memory_limit: str, counts_processes: bool) -> list[Guarantee]:
    """Compare the most that all sandboxes with the default limits can use together against the allowed total.
    `no_memory_limit` is the reason why sandboxes have no memory limit, or empty if they have one."""
    config = LocalSandboxConfig()
    sandboxes = config.max_live or default_live(allowed)
    one = share(allowed, sandboxes, config.pids, config.open_files, counted=counts_processes)
    processes, open_files = one.of_all(sandboxes)
    unlimited = f"no limit: {no_memory_limit}" if no_memory_limit else ""
    memory = (
        f"{sandboxes} sandboxes x {_gib(config.memory_bytes or 0)} = {_gib(sandboxes * (config.memory_bytes or 0))}; "
        f"their total is limited to {_gib(allowed.memory_bytes)} of {_gib(host.memory_bytes)}"
    )
    taken = f"{one.processes} each, {sandboxes} sandboxes; all hold at most {allowed.processes}"
    opened = f"{one.open_files} for each process, {sandboxes} sandboxes; all hold at most {allowed.open_files}"
    guarded = ", or the largest holder above its even share ends"
    rows = (
        ("all memory", not unlimited, memory, unlimited),
        (
            "all processes",
            counts_processes or processes <= allowed.processes,
            f"{taken} of kernel.pid_max {host.processes}{guarded if processes > allowed.processes else ''}",
            "lower sandbox.local.max_live",
        ),
        (
            "all descriptors",
            True,
            f"{opened} of fs.file-max {host.open_files}{guarded if open_files > allowed.open_files else ''}",
            "",
        ),
    )
    return [
        Guarantee(name=name, present=fits, detail=text if fits else f"{text}; {fix}", required=False)
        for name, fits, text, fix in rows
    ]


def _gib(amount_bytes: int) -> str:
    return f"{amount_bytes / (1 << 30):.1f} GiB"
