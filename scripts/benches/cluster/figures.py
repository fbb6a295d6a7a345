"""The bench of a cluster, `scripts/bench cluster`: the simulated recipe on a head and three nodes and on a local Ray,
with the same number of rollouts in flight, and the quickstart with sandbox servers on two nodes.

Invariants:
- Walls are from the ledger, first order to last step, while the cluster is up: the start of Ray is in none of them.
- CPU time of Ray is that of its own processes on all hosts (GCS, raylets, their agents), without actors, from the
  submission of a run to its end, less that of the same cluster without a run for as long.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from benches.cluster.ledger_times import wall_s
from benches.cluster.processes import HostProcess, cpu_s, increase, is_of_ray, processes_of
from headrace.actors.errors import ConfigError
from headrace.buffer.audit.verify import verify
from support.cluster_rig import GUARD_S, QUICK, ROOT, WORKERS, Cluster, ClusterRun, running_cluster, wait_until
from support.ray_hosts import redis_folder

MOST_WALL: Final = 1.3
MOST_RAY_CPU_MS: Final = 4.0
LEAST_SUCCESS: Final = 0.85
"""Held-out success of a quickstart that has learned, as in `.ci/check_learned.py`."""
CPUS: Final = 6
SANDBOX_PORT: Final = 5000
QUICKSTART_S: Final = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One run. `cpu_s` is the CPU time of Ray's own processes in `measured_s` seconds, zero for a local run."""

    wall_s: float
    rollouts: int
    lost: int
    trained_twice: int
    staleness: int
    bound: int
    cpu_s: float = 0.0
    measured_s: float = 0.0


def measure(
    folder: Path, *, steps: int, repeats: int, quickstart: bool, say: Callable[[str], object]
) -> dict[str, Any]:
    """Run the recipe on the cluster and locally in turn, then the quickstart if it is wanted. Raises ConfigError
    without Redis."""
    if (redis := redis_folder()) is None:
        raise ConfigError("scripts/install redis could not install Redis here: install redis-server")
    on_cluster: list[Passed] = []
    local: list[Passed] = []
    with running_cluster(folder / "shared", redis, cpus=CPUS) as cluster:
        idle: float | None = None
        for number in range(repeats):
            on_cluster.append(cluster_pass(cluster, f"bench-{number}", steps))
            say(f"on the cluster: {on_cluster[-1].wall_s:.1f} s")
            if idle is None:
                idle = idle_cpu_per_s(cluster, on_cluster[-1].measured_s)
            local.append(local_pass(folder / "local", f"bench-{number}", steps))
            say(f"locally: {local[-1].wall_s:.1f} s")
        assert idle is not None
        figures = report(on_cluster, local, idle)
        if quickstart:
            figures["quickstart"] = quickstart_pass(cluster)
    return figures | {"load_average": os.getloadavg()[0]}


def report(on_cluster: Sequence[Passed], local: Sequence[Passed], idle_cpu_per_s: float) -> dict[str, Any]:
    """Return the figures of both kinds of runs."""
    walls = {name: statistics.median(one.wall_s for one in runs) for name, runs in _named(on_cluster, local).items()}
    per_rollout_ms = [1000 * (one.cpu_s - idle_cpu_per_s * one.measured_s) / one.rollouts for one in on_cluster]
    return {
        "lost": sum(one.lost for one in on_cluster),
        "trained_twice": sum(one.trained_twice for one in on_cluster),
        "max_staleness_seen": max(one.staleness for one in on_cluster),
        "max_staleness": min(one.bound for one in on_cluster),
        "wall_over_local": walls["cluster"] / walls["local"],
        "ray_cpu_ms_per_rollout": statistics.median(per_rollout_ms),
        "idle_cpu_per_s": idle_cpu_per_s,
        "passes": {name: [asdict(one) for one in runs] for name, runs in _named(on_cluster, local).items()},
    }


def _named(on_cluster: Sequence[Passed], local: Sequence[Passed]) -> dict[str, Sequence[Passed]]:
    return {"cluster": on_cluster, "local": local}


def misses(figures: dict[str, Any]) -> list[str]:
    """Return a line for each limit that is not met."""
    limits = [("lost", 0), ("trained_twice", 0), ("max_staleness_seen", figures["max_staleness"])]
    limits += [("wall_over_local", MOST_WALL), ("ray_cpu_ms_per_rollout", MOST_RAY_CPU_MS)]
    found = [f"{name} is {figures[name]:.3g}, above {most:g}" for name, most in limits if figures[name] > most]
    if (quickstart := figures.get("quickstart")) is not None:
        counts = {name: quickstart[name] for name in ("lost", "trained_twice") if quickstart[name]}
        found += [f"quickstart: {name} is {count}" for name, count in counts.items()]
        if quickstart["max_staleness_seen"] > quickstart["max_staleness"]:
            found.append(f"quickstart: staleness {quickstart['max_staleness_seen']}")
        if quickstart["final_success"] < LEAST_SUCCESS:
            found.append(f"quickstart: held-out success {quickstart['final_success']:.3f}, below {LEAST_SUCCESS:g}")
    return found


def cluster_pass(cluster: Cluster, name: str, steps: int) -> Passed:
    """Run the simulated recipe on the cluster, with one worker in each of two rollout units."""
    before, start_s = cpu_s(_of_ray(cluster)), time.monotonic()
    run = cluster.submit("simulated.toml", *QUICK, f"training.steps={steps}", name=name)
    _finish(run)
    measured_s = time.monotonic() - start_s
    used_s = sum(increase(before, cpu_s(_of_ray(cluster))).values())
    return _passed(run.directory.path, cpu_s=used_s, measured_s=measured_s)


def local_pass(folder: Path, name: str, steps: int) -> Passed:
    """Run the simulated recipe on a local Ray, with as many workers as the cluster has in all."""
    given = (*QUICK, f"training.steps={steps}", f"service.workers={len(WORKERS)}")
    command = [str(Path(sys.executable).with_name("headrace")), "run", str(ROOT / "scripts/recipes/simulated.toml")]
    command += ["--quiet", "--runs-dir", str(folder), "--name", name]
    command += [word for override in given for word in ("--set", override)]
    subprocess.run(command, check=True, stdout=sys.stderr, timeout=GUARD_S)
    return _passed(folder / name)


def _passed(run_dir: Path, *, cpu_s: float = 0.0, measured_s: float = 0.0) -> Passed:
    found = verify(run_dir)
    if found.problems or found.max_staleness is None:
        raise RuntimeError(f"{run_dir}: {found.problems or 'it trained nothing'}")
    return Passed(
        wall_s=wall_s(run_dir),
        rollouts=found.issued,
        lost=found.lost,
        trained_twice=found.trained_twice,
        staleness=found.max_staleness_seen,
        bound=found.max_staleness,
        cpu_s=cpu_s,
        measured_s=measured_s,
    )


def _finish(run: ClusterRun, *, timeout_s: float = GUARD_S) -> None:
    ended = run.wait_for_end(timeout_s=timeout_s)
    if ended["state"] != "finished":
        raise RuntimeError(f"run {run.run_id} ended as {ended['state']}: {ended['reason']}")


def idle_cpu_per_s(cluster: Cluster, seconds: float) -> float:
    """Return the CPU seconds per second of Ray's own processes while no run is in progress."""
    before, start_s = cpu_s(_of_ray(cluster)), time.monotonic()
    time.sleep(seconds)
    used_s = sum(increase(before, cpu_s(_of_ray(cluster))).values())
    return used_s / (time.monotonic() - start_s)


def quickstart_pass(cluster: Cluster) -> dict[str, Any]:
    """Run the quickstart with a sandbox server on each worker node, and return the figures of its summary."""
    shared = cluster.storage.parent
    for name, text in (("keys", "team:one-key\n"), ("key", "one-key\n")):
        (shared / name).touch(mode=0o600)
        (shared / name).write_text(text, encoding="utf-8")
    urls = [_serve_sandboxes(cluster, number, shared) for number in WORKERS]
    given = ("sandbox.provider=remote", f"sandbox.remote.key_file={shared / 'key'}")
    run = cluster.submit("quickstart.toml", *given, f"sandbox.remote.urls={orjson.dumps(urls).decode()}", name="quick")
    _finish(run, timeout_s=QUICKSTART_S)
    summary = orjson.loads(run.directory.summary.read_bytes())
    names = ("lost", "trained_twice", "max_staleness_seen", "max_staleness", "base_success", "final_success", "steps")
    return {name: summary[name] for name in (*names, "rollouts", "train_wall_s")}


def _serve_sandboxes(cluster: Cluster, number: int, shared: Path) -> str:
    """Start a sandbox server on a node, and return its URL."""
    address = cluster.hosts[number].address
    url, log = f"http://{address}:{SANDBOX_PORT}", shared / f"sandboxes-{number}.log"
    log.write_bytes(b"")
    options = ("--host", address, "--port", str(SANDBOX_PORT), "--keys", str(shared / "keys"))
    server = cluster.start("serve", "sandbox", *options, "--state", "/tmp/sandboxes", log=log, host=number)
    wait_until(lambda: url in log.read_text(encoding="utf-8") or server.poll() is not None, f"the sandboxes of {url}")
    return url


def _of_ray(cluster: Cluster) -> list[HostProcess]:
    return [one for one in processes_of(cluster.hosts) if is_of_ray(one.name) and not one.name.startswith("IDLE")]
