"""Runs on a Ray cluster over hosts of namespaces: their submission, and what can be read of them from outside.

Hosts 11 (control), 12 and 13 (everything else) have a head beside them, whose state is in Redis. The state of the runs
is on the disk of host 11, which outlives the host; the storage is a folder that all hosts see.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from headrace.actors.record.files.metrics import last_metric
from headrace.actors.record.files.run_directory import RunDirectory
from support.hosts import DISK, Host, Network
from support.ray_hosts import RayHosts

ROOT: Final = Path(__file__).resolve().parents[2]
STATE: Final = DISK / "state"
CONTROL: Final = 11
WORKERS: Final = (12, 13)
SHARED_ROLE: Final = "work"
LIMITED: Final = "limited"
"""Owner with a quota of one run."""
SANDBOX_PORT: Final = 5000
API_PORT: Final = 8000
"""Port of Ray Serve's proxy."""
GUARD_S: Final = 300.0
POLL_S: Final = 0.1
QUICK: Final = (
    "agent.simulated.durations.mean_s=2.0",
    "agent.simulated.durations.median_s=1.7",
    "agent.simulated.durations.cap_s=6",
    "rollout.agent_timeout_s=20",
    "learner.simulated.step_s=0.5",
    "engines.simulated.push_s=0.1",
    "dispatcher.slots_per_worker=32",
    "evaluation.tasks=4",
    "training.save_every=4",
    "buffer.batch_size=32",
)
"""The simulated recipe with rollouts of two seconds."""


class Cluster:
    """A running cluster."""

    def __init__(self, ray: RayHosts, network: Network, *, cpus: int = 2) -> None:
        self.ray = ray
        self.storage = network.shared / "storage"
        self._disks = network.shared.parent
        self._network = network
        self.hosts: dict[int, Host] = {}
        self._cpus = cpus
        self.control = CONTROL

    def boot_head(self) -> None:
        self.hosts[10] = self.ray.head()

    def boot(self, number: int, *, control: bool = False, with_disk: bool = True) -> None:
        """Boot a node, or boot it again. A control node has its files of before, unless it comes without its disk; a
        new one takes the place of the last one."""
        if not control and number != CONTROL:
            self.hosts[number] = self.ray.node(number, role=SHARED_ROLE, cpus=self._cpus)
            return
        disk = self._disks / f"disk-{number}"
        if not with_disk:
            shutil.rmtree(disk)
        disk.mkdir(exist_ok=True)
        self.control = number
        self.hosts[number] = self.ray.node(number, role="control", cpus=self._cpus, disk=disk)

    def boot_with_role(self, number: int, role: str) -> None:
        """Boot a node of another role than the workers."""
        self.hosts[number] = self.ray.node(number, role=role, cpus=self._cpus)

    def boot_without_ray(self, number: int) -> None:
        """Boot a host that is no node of the cluster."""
        self.hosts[number] = self._network.boot(number)

    @property
    def disk(self) -> Path:
        """The disk of the control node, as seen from outside the hosts."""
        return self._disks / f"disk-{self.control}"

    def headrace(self, *words: str, host: int = 13, timeout_s: float = GUARD_S) -> str:
        """Run a command of headrace on a node, and return its output."""
        return self.hosts[host].run(*self._command(words), timeout_s=timeout_s, **self._environment)

    def start(self, *words: str, log: Path, host: int = 13) -> subprocess.Popen[bytes]:
        """Start a command of headrace on a node."""
        return self.hosts[host].start(*self._command(words), log=log, **self._environment)

    def options(self, *overrides: str) -> list[str]:
        """Return the options of `headrace run` for this cluster."""
        given = (
            f"cluster.state={STATE}",
            f"cluster.storage={self.storage}",
            *(f"cluster.roles.{role}={SHARED_ROLE}" for role in ("rollout", "engine", "learner")),
            *overrides,
        )
        quotas = self.storage.parent / "quotas.toml"
        quotas.write_text(f"[owners.{LIMITED}]\nruns = 1\n", encoding="utf-8")
        options = ("--address", self.ray.address, "--quotas", str(quotas))
        return [*options, *(word for override in given for word in ("--set", override))]

    def serve_sandboxes(self, number: int) -> str:
        """Start a sandbox server on a node, and return its URL. The key of its only user is in the file `key`."""
        folder, url = self.storage.parent, f"http://{self.hosts[number].address}:{SANDBOX_PORT}"
        for name, text in (("keys", "team:one-key\n"), ("key", "one-key\n")):
            (folder / name).touch(mode=0o600)
            (folder / name).write_text(text, encoding="utf-8")
        log = folder / f"sandboxes-{number}.log"
        log.write_bytes(b"")
        options = ("--host", self.hosts[number].address, "--port", str(SANDBOX_PORT), "--keys", str(folder / "keys"))
        server = self.start("serve", "sandbox", *options, "--state", "/tmp/sandboxes", log=log, host=number)
        wait_until(lambda: url in log.read_text(encoding="utf-8") or server.poll() is not None, "the sandbox server")
        assert server.poll() is None, log.read_text(encoding="utf-8")
        return url

    def submit(self, recipe: str, *overrides: str, name: str, owner: str = "tester") -> ClusterRun:
        """Submit a recipe and return its run."""
        path = str(ROOT / "scripts" / "recipes" / recipe)
        options = ("--name", name, "--owner", owner, "--detach", "--quiet", "--json", "-")
        output = self.headrace("run", path, *options, *self.options(*overrides))
        return ClusterRun(self, json.loads(output[output.index("{") :])["run_id"], owner)

    def run_named(self, name: str, owner: str = "tester") -> ClusterRun:
        """Return the run of this name."""
        words = ("status", "--address", self.ray.address, "--owner", owner, "--json", "-")
        output = self.headrace(*words)
        [found] = [run for run in json.loads(output[output.index("[") :]) if run["name"] == name]
        return ClusterRun(self, found["run_id"], owner)

    def has_actor(self, number: int, cls: str) -> bool:
        """Return whether an actor of this class is on a node."""
        commands = (Path(f"/proc/{process}/cmdline").read_bytes() for process in self.hosts[number].processes())
        return any(command.startswith(f"ray::{cls}".encode()) for command in commands)

    def has_program(self, number: int, words: str) -> bool:
        """Return whether a process with these words in its command is on a node."""
        commands = (Path(f"/proc/{process}/cmdline").read_bytes() for process in self.hosts[number].processes())
        return any(words.encode() in command.replace(b"\0", b" ") for command in commands)

    def left_over(self) -> list[str]:
        """Return the actors and placement groups of runs that exist."""
        found: list[str] = json.loads(self.ray.run(self.hosts[13], "-m", "support.cluster_contents").splitlines()[-1])
        return found

    def _command(self, words: tuple[str, ...]) -> tuple[str, ...]:
        return (str(Path(sys.executable).with_name("headrace")), *words)

    @property
    def _environment(self) -> dict[str, str]:
        return {"RAY_ADDRESS": self.ray.address, **self.ray.environment}


class ClusterRun:
    """One run, read from the disk of the control node."""

    def __init__(self, cluster: Cluster, run_id: str, owner: str) -> None:
        self.cluster, self.run_id, self.owner = cluster, run_id, owner

    @property
    def directory(self) -> RunDirectory:
        """The run's folders, as seen from outside the hosts."""
        state = self.cluster.disk / STATE.relative_to(DISK)
        return RunDirectory(path=state / self.run_id, shared=self.cluster.storage / self.run_id)

    def steps(self) -> int:
        """Return the number of the newest step in the metrics."""
        record = last_metric(self.directory.metrics, "step")
        return int(record["step"]) if record else 0

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: self.steps() >= step, f"step {step} of run {self.run_id}")

    def status(self, *, host: int = 13) -> dict[str, Any]:
        words = ("status", self.run_id, "--address", self.cluster.ray.address, "--owner", self.owner, "--json", "-")
        output = self.cluster.headrace(*words, host=host)
        found: dict[str, Any]
        # Ray may say something afterwards, such as that a node was lost.
        found, _ = json.JSONDecoder().raw_decode(output[output.index("{") :])
        return found

    def recover(self) -> None:
        """Continue the run from its storage, on a control node without its ledger."""
        words = ("resume", self.run_id, "--from-storage", "--address", self.cluster.ray.address, "--owner", self.owner)
        self.cluster.headrace(*words)

    def wait_for_end(self, timeout_s: float = GUARD_S) -> dict[str, Any]:
        """Return the status of the ended run."""
        words = ("status", self.run_id, "--events", "--address", self.cluster.ray.address, "--owner", self.owner)
        self.cluster.headrace(*words, timeout_s=timeout_s)
        return self.status()

    def check_finished(self, steps: int) -> None:
        """Wait for the end, and check that each step was made once."""
        ended = self.wait_for_end()
        assert (ended["state"], ended["steps"]) == ("finished", steps), ended
        report = self.verified()
        assert report["clean"], report["problems"]
        assert (report["trained_twice"], report["lost"], report["steps"]) == (0, 0, steps)

    def verified(self) -> dict[str, Any]:
        """Return the report of `headrace ledger verify`, run on the control node."""
        words = ("ledger", "verify", str(STATE / self.run_id), "--json", "-")
        output = self.cluster.headrace(*words, host=self.cluster.control)
        report: dict[str, Any] = json.loads(output[output.index("{") :])
        return report


@contextmanager
def running_cluster(folder: Path, redis: Path, *, cpus: int = 2) -> Iterator[Cluster]:
    """Start the cluster, with CPUs as Ray counts them on each node; it is gone at the end of the block."""
    network = Network(folder)
    with RayHosts(network, redis) as ray:
        cluster = Cluster(ray, network, cpus=cpus)
        cluster.boot_head()
        for number in (CONTROL, *WORKERS):
            cluster.boot(number)
        yield cluster


def wait_until(happened: Callable[[], bool], what: str, timeout_s: float = GUARD_S) -> None:
    """Wait for something that tells nobody. Raises TimeoutError."""
    end_s = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > end_s:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(POLL_S)
