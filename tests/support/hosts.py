"""Hosts of one machine: each is a set of namespaces (net, mount, pid, uts, ipc) on a bridge. Needs root.

A host has its own address, process ids, /tmp, /dev/shm, HOME and /etc/hosts; it shares the kernel, the other files and
the user ids. What breaks on a cluster passes where these are shared, as with Ray's `cluster_utils`.

Invariants:
- A host dies with the process that made it, and its control groups go with it.
- The bridge and all hosts have fixed MAC addresses. A bridge otherwise takes a new one whenever a host comes or goes,
  which stalls connections through it for a minute.
- `kill` is a loss of power: all processes end at once, and nobody gets a packet about it. `cut` takes the link down.
- A host's files are gone when it is booted again, but for those of its disk at `DISK`, if it was booted with one.

A folder that all hosts see, `shared`, stays reachable over a cut link.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

from headrace.buffer.primitives.file_lock import FileLock

START_S: Final = 20.0
DISK: Final = Path("/tmp/disk")
"""Path in a host of the folder that outlives it."""
CHECKOUT: Final = Path(__file__).resolve().parents[2]
FIRST_PID_NAMESPACE: Final = 0xEFFFFFFC
"""Inode of the outermost pid namespace, in which all processes are visible."""
_GROUP: Final = re.compile(r"headrace-(\d+)-\d+-\d+")
"""Control groups of a sandbox launcher; the number is that of its pid namespace."""
# The new /tmp is furnished at /mnt and then moved into place, since `shared` and the checkout may lie in the old one.
# Bash as the first process ends orphans.
_FIRST_PROCESS: Final = r"""
set -e
mount -t tmpfs -o size=2g,mode=1777 tmpfs /mnt
for seen in "$SHARED" "$CHECKOUT"; do
  case "$seen" in /tmp/*) mkdir -p "/mnt/${seen#/tmp/}"; mount --bind "$seen" "/mnt/${seen#/tmp/}";; esac
done
if [ -n "$DISK" ]; then mkdir /mnt/disk; mount --bind "$DISK" /mnt/disk; fi
mount --move /mnt /tmp
mount -t tmpfs -o size=256m,mode=1777 tmpfs /dev/shm
mount --bind "$HOSTS" /etc/hosts
hostname "$NAME"; mkdir -p "$HOME"; cd /tmp
ip link set lo up
while ! ip link show eth0 > /dev/null 2>&1; do sleep 0.05; done
ip address add "$ADDRESS/24" dev eth0; ip link set eth0 up
: > "$READY"
trap 'exit 0' TERM
sleep infinity &
while :; do wait -n || sleep 0.2; done
"""


class HostNotStarted(RuntimeError):
    """A host did not come up; its log is in the network's folder."""


class Host:
    """One host of a `Network`."""

    def __init__(self, network: Network, number: int, disk: Path | None) -> None:
        self.address = f"{network.prefix}.{number}"
        self.name = f"{network.tag}-{number}"
        self._link = f"{network.tag}v{number}"
        ready = network.shared / f"{self.name}.ready"
        ready.unlink(missing_ok=True)
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": "/tmp/home",
            "LANG": "C.UTF-8",
            "SHARED": str(network.shared),
            "CHECKOUT": str(CHECKOUT),
            "NAME": self.name,
            "ADDRESS": self.address,
            "HOSTS": str(network.names),
            "READY": str(ready),
            "DISK": str(disk or ""),
        }
        namespaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child")
        with (network.shared / f"{self.name}.log").open("wb") as log:
            self._outer = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "-c", _FIRST_PROCESS],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        self._inside: list[subprocess.Popen[bytes]] = []
        self.process_id = self._first_process()
        self._pid_namespace = Path(f"/proc/{self.process_id}/ns/pid").stat().st_ino
        peer, mac = f"{self._link}p", f"{network.mac}:00:{number:02x}"
        # Left by a maker that was killed: the kernel removes it some time after the host's last process.
        _run("ip", "link", "del", self._link, check=False)
        _run("ip", "link", "add", self._link, "type", "veth", "peer", "name", peer, "address", mac)
        _run("ip", "link", "set", self._link, "master", network.bridge, "up")
        _run("ip", "link", "set", peer, "netns", str(self.process_id), "name", "eth0")
        self._wait_until(ready.exists)

    def start(self, *command: str, log: Path | None = None, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process inside, in its /tmp. Its output goes to `log` (appended), or can be read."""
        process = self._enter(command, environment, log=log)
        self._inside.append(process)
        return process

    def kill_program(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a program that `start` started. (A signal to `process` reaches the one that entered the host.)"""
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        process.wait(timeout=START_S)

    def run(self, *command: str, timeout_s: float = 60, **environment: str) -> str:
        """Run a command inside, and return its output. Raises CalledProcessError with the output, TimeoutExpired."""
        with self._enter(command, environment, log=None) as process:
            try:
                output = process.communicate(timeout=timeout_s)[0].decode(errors="replace")
            except subprocess.TimeoutExpired:
                self.kill_program(process)  # or its end is another test's unclosed file
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output)
        return output

    def processes(self) -> list[int]:
        """Return the process ids, as seen from outside, of all processes of this host."""
        return [process for process, namespace in _pid_namespaces() if namespace == self._pid_namespace]

    def control_groups(self) -> list[Path]:
        """Return the control groups of this host's sandbox launchers, one for each controller."""
        return [folder for namespace, folder in _launcher_groups() if namespace == self._pid_namespace]

    def cut(self) -> None:
        """Take the link down: packets are lost both ways."""
        _run("ip", "link", "set", self._link, "down")

    def join(self) -> None:
        """Take the link up again."""
        _run("ip", "link", "set", self._link, "up")

    def kill(self) -> None:
        """End all processes at once, as a loss of power does. Idempotent."""
        if self._outer.poll() is None:
            os.kill(self.process_id, signal.SIGKILL)
        self._outer.wait(timeout=START_S)
        for process in self._inside:
            process.communicate(timeout=START_S)
        self._inside.clear()
        _run("ip", "link", "del", self._link, check=False)
        _remove_groups(self._pid_namespace)

    def _enter(
        self, command: tuple[str, ...], environment: dict[str, str], *, log: Path | None
    ) -> subprocess.Popen[bytes]:
        words = ["nsenter", "--target", str(self.process_id), *("--net", "--mount", "--pid", "--uts", "--ipc")]
        inside = ["sh", "-c", 'cd /tmp && exec "$@"', "sh", *command]
        # Made here: the file may lie in a folder of the outer /tmp.
        output: int | IO[bytes] = subprocess.PIPE if log is None else log.open("ab")
        try:
            return subprocess.Popen(
                [*words, "--", *inside],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment | environment,
            )
        finally:
            if not isinstance(output, int):
                output.close()

    def _first_process(self) -> int:
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self._wait_until(lambda: bool(children.read_text().split()))
        return int(children.read_text().split()[0])

    def _wait_until(self, happened: Callable[[], bool]) -> None:
        end_s = time.monotonic() + START_S
        while not happened():
            if self._outer.poll() is not None or time.monotonic() > end_s:
                raise HostNotStarted(self.name)
            time.sleep(0.02)


class Network:
    """A bridge with up to 20 hosts, `<prefix>.10` to `<prefix>.29`; this process is `<prefix>.1`. A machine has one
    network of a tag (at most 4 letters) at a time: another one waits. `shared` is a folder that every host sees."""

    def __init__(self, shared: Path, *, prefix: str = "10.77.0", tag: str = "hr") -> None:
        self.shared, self.prefix, self.tag = shared, prefix, tag
        self.bridge = f"{tag}br"
        self.mac = "02:77:" + ":".join(f"{int(part):02x}" for part in prefix.split(".")[1:])
        self._hosts: dict[int, Host] = {}
        shared.mkdir(parents=True, exist_ok=True)
        lock = Path(tempfile.gettempdir(), f"headrace-hosts-{tag}.lock")
        self._lock = FileLock(lock)
        self.names = shared / f"{tag}.hosts"
        lines = (f"{prefix}.{number} {tag}-{number}\n" for number in range(10, 30))
        self.names.write_text("127.0.0.1 localhost\n" + "".join(lines), encoding="utf-8")
        # Left by a process that was killed: its hosts have died with it, but the bridge has not.
        _run("ip", "link", "del", self.bridge, check=False)
        _remove_groups()
        _run("ip", "link", "add", self.bridge, "address", f"{self.mac}:ff:01", "type", "bridge")
        _run("ip", "address", "add", f"{prefix}.1/24", "dev", self.bridge)
        _run("ip", "link", "set", self.bridge, "up")

    def boot(self, number: int, *, disk: Path | None = None) -> Host:
        """Start a host; one of this number is killed before. Its files are those of `disk`, a folder of this machine
        that it sees as `DISK`, or none."""
        if (old := self._hosts.get(number)) is not None:
            old.kill()
        self._hosts[number] = host = Host(self, number, disk)
        return host

    def close(self) -> None:
        """Kill all hosts and remove the bridge. Idempotent."""
        for host in self._hosts.values():
            host.kill()
        _run("ip", "link", "del", self.bridge, check=False)
        self._lock.release()


def missing() -> str:
    """Return what this machine lacks for hosts, or ""."""
    if os.geteuid() != 0:
        return "hosts of namespaces need root"
    namespaces = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork")
    probe = ["unshare", *namespaces, "ip", "link", "add", "probe", "type", "bridge"]
    try:
        found = subprocess.run(probe, capture_output=True, text=True, timeout=START_S, check=False)
    except FileNotFoundError as error:
        return f"hosts of namespaces need {error.filename}"
    return "" if found.returncode == 0 else f"hosts of namespaces are not possible here: {found.stderr.strip()}"


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, stdout=subprocess.DEVNULL, stderr=None if check else subprocess.DEVNULL)


def _pid_namespaces() -> Iterator[tuple[int, int]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(entry.name), (entry / "ns" / "pid").stat().st_ino


def _launcher_groups() -> list[tuple[int, Path]]:
    """Return the control groups of all sandbox launchers, with the pid namespace of each."""
    # `os.walk` does not mind groups that vanish meanwhile, as `rglob` does.
    folders = (Path(folder) for folder, _, _ in os.walk("/sys/fs/cgroup"))
    return [(int(name[1]), folder) for folder in folders if (name := _GROUP.fullmatch(folder.name))]


def _remove_groups(pid_namespace: int | None = None) -> None:
    """Remove the empty control groups that launchers of a dead pid namespace left, or of all dead ones where this
    process sees all processes."""
    if pid_namespace is None and Path("/proc/self/ns/pid").stat().st_ino != FIRST_PID_NAMESPACE:
        return
    found = _launcher_groups()
    # After the groups: whoever made one of them is among these.
    alive = {namespace for _, namespace in _pid_namespaces()}
    for number, top in found:
        if number in alive or pid_namespace not in (None, number):
            continue
        for folder, _, _ in os.walk(top, topdown=False):
            with suppress(OSError):
                Path(folder).rmdir()
