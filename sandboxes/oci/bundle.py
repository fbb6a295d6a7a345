"""OCI bundle of one sandbox: its `config.json`, and the process files of its commands.

Invariants: pure; nothing is copied from the host's environment; fields whose defaults depend on the runtime are set
explicitly (network, capabilities, no new privileges, masked paths).

Formats: OCI runtime-spec 1.0 (config.md, config-linux.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from headrace.sandboxes.base import Command
from headrace.sandboxes.launcher.commands import Account
from headrace.sandboxes.linux.id_blocks import IDS_PER_SANDBOX

SEARCH_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CAPABILITIES: Final = tuple(
    f"CAP_{name}" for name in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID")
)
_OOM_SCORE: Final = 500
_PERIOD_US: Final = 100_000
_MASKED: Final = (
    *("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "sysrq-trigger"),
    *("timer_list", "timer_stats"),
)
_READ_ONLY: Final = ("bus", "fs", "irq", "sys")
_ALLOWED_FAMILIES: Final = (1, 2, 10, 16)
"""unix, inet, inet6, netlink: as in `seccomp`."""
_FAMILIES: Final = 46
_REFUSED_CALLS: Final = (
    *("add_key", "bpf", "delete_module", "finit_module", "fsconfig", "fsmount", "fsopen", "fspick", "init_module"),
    *("io_uring_enter", "io_uring_register", "io_uring_setup", "kexec_file_load", "kexec_load", "keyctl", "mount"),
    *("mount_setattr", "move_mount", "open_by_handle_at", "open_tree", "perf_event_open", "pivot_root"),
    *("process_vm_readv", "process_vm_writev", "request_key", "setns", "swapoff", "swapon", "umount2", "unshare"),
    *("syslog", "userfaultfd"),
)
_CLONE_NEWUSER: Final = 0x10000000
_ARCHITECTURES: Final = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97

# It waits on a pipe whose other end the keeper holds, so it ends with the keeper. Bash reaps all orphans meanwhile.
_INIT: Final = "while read -r; do :; done"
_ENTER: Final = (
    'if [[ -n $2 ]]; then cd -- "$2" || { echo "cannot run the command: no folder $2" >&2; exit 126; }; '
    "else cd /workspace 2>/dev/null || cd /; fi; unset OLDPWD; "
)


class BindMount(NamedTuple):
    source: str
    target: str


class Limits(NamedTuple):
    """Limits of one sandbox; None for no limit."""

    cpus: float | None
    memory_bytes: int | None
    pids: int
    open_files: int


class BundlePlan(NamedTuple):
    """Properties of a bundle that differ between sandboxes."""

    sandbox_id: str
    bash: str
    base_id: int
    limits: Limits
    cgroup: str
    machine: str
    system: tuple[BindMount, ...] = ()
    """Folders with the host's own programs, mounted read-only."""
    frozen: tuple[BindMount, ...] = ()


def bundle_config(plan: BundlePlan) -> dict[str, Any]:
    """Return the content of `config.json`; the root file system is the folder `rootfs` next to it."""
    # If devices are not mentioned, a runtime allows all of them.
    resources: dict[str, Any] = {"devices": [{"allow": False, "access": "rwm"}], "pids": {"limit": plan.limits.pids}}
    if plan.limits.memory_bytes is not None:
        resources["memory"] = {"limit": plan.limits.memory_bytes}
    if plan.limits.cpus is not None:
        resources["cpu"] = {"quota": max(1000, int(plan.limits.cpus * _PERIOD_US)), "period": _PERIOD_US}
    return {
        "ociVersion": "1.0.2",
        "process": {
            **_process(Identity(0, 0, ()), plan.limits.open_files),
            "args": [plan.bash, "-c", _INIT],
            "env": [f"PATH={SEARCH_PATH}"],
            "oomScoreAdj": _OOM_SCORE,
        },
        "root": {"path": "rootfs", "readonly": False},
        "hostname": "sandbox",
        "mounts": _mounts(plan),
        "linux": {
            "namespaces": [{"type": name} for name in ("pid", "network", "ipc", "uts", "mount", "user")],
            "uidMappings": [_mapping(plan.base_id)],
            "gidMappings": [_mapping(plan.base_id)],
            "cgroupsPath": plan.cgroup,
            "resources": resources,
            "sysctl": {"net.ipv4.ip_unprivileged_port_start": "0"},
            "maskedPaths": [f"/proc/{name}" for name in _MASKED],
            "readonlyPaths": [f"/proc/{name}" for name in _READ_ONLY],
            "seccomp": _seccomp(plan.machine),
        },
    }


def _mapping(base_id: int) -> dict[str, int]:
    return {"containerID": 0, "hostID": base_id, "size": IDS_PER_SANDBOX}


def _mounts(plan: BundlePlan) -> list[dict[str, Any]]:
    safe = ["nosuid", "noexec"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": [*safe, "nodev"]},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": [*safe, "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        },
        {
            "destination": "/dev/shm",
            "type": "tmpfs",
            "source": "shm",
            "options": [*safe, "nodev", "mode=1777", "size=65536k"],
        },
    ]
    mounts += [_bind(mount, ["nosuid", "nodev"]) for mount in plan.system]
    mounts += [_bind(mount, ["nosuid", "nodev", "noexec"]) for mount in plan.frozen]
    return mounts


def _bind(mount: BindMount, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": mount.target, "type": "bind", "source": mount.source, "options": ["rbind", "ro", *options]}


def _seccomp(machine: str) -> dict[str, Any]:
    """Return a filter that refuses system calls against which namespaces do not protect, and those that create
    namespaces or mounts."""
    families = [
        _refused(["socket"], _EAFNOSUPPORT, [{"index": 0, "value": number, "op": "SCMP_CMP_EQ"}])
        for number in range(_FAMILIES)
        if number not in _ALLOWED_FAMILIES
    ]
    new_user = {"index": 0, "value": _CLONE_NEWUSER, "valueTwo": _CLONE_NEWUSER, "op": "SCMP_CMP_MASKED_EQ"}
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [_ARCHITECTURES[machine]] if machine in _ARCHITECTURES else [],
        "syscalls": [
            _refused(_REFUSED_CALLS, _EPERM),
            _refused(["clone"], _EPERM, [new_user]),
            # Its flags are in memory, which a filter cannot read; C libraries fall back to clone.
            _refused(["clone3"], _ENOSYS),
            *families,
        ],
    }


def _refused(names: Sequence[str], number: int, conditions: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": number}
    return {**rule, "args": list(conditions)} if conditions else rule


class Identity(NamedTuple):
    user_id: int
    group_id: int
    groups: tuple[int, ...]


def _process(identity: Identity, open_files: int) -> dict[str, Any]:
    """Return the fields that the first process and every command have in common."""
    effective = list(_CAPABILITIES) if identity.user_id == 0 else []
    sets: dict[str, list[str]] = {"bounding": list(_CAPABILITIES), "effective": effective, "permitted": effective}
    return {
        "terminal": False,
        "user": {"uid": identity.user_id, "gid": identity.group_id, "additionalGids": list(identity.groups)},
        "cwd": "/",
        "capabilities": {**sets, "inheritable": [], "ambient": []},
        "rlimits": [
            {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            {"type": "RLIMIT_NOFILE", "soft": open_files, "hard": open_files},
        ],
        "noNewPrivileges": True,
    }


def command_process(
    account: Account, bash: str, command: Command, environment: Mapping[str, str], open_files: int
) -> dict[str, Any]:
    """Return a command's process file; the command's variables are added to the sandbox's `environment`."""
    folder = command.cwd or ""
    if isinstance(command.command, str):
        words = [bash, "-c", f'{_ENTER}exec "$3" -c "$1"', "bash", command.command, folder, bash]
    else:
        words = [bash, "-c", f'{_ENTER}shift 2; exec -- "$@"', "bash", "", folder, *command.command]
    known = {
        "PATH": SEARCH_PATH,
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "LANG": "C.UTF-8",
        **environment,
        **command.env,
    }
    identity = Identity(account.user_id, account.group_id, account.groups)
    return {
        **_process(identity, open_files),
        "args": words,
        "env": [f"{name}={value}" for name, value in known.items()],
    }
