"""Processes of the hosts of a cluster, as seen from outside: their classes, CPU time and memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import psutil

from support.hosts import Host

ACTOR: Final = re.compile(r"ray::([A-Za-z_]+)")
"""Title of a process of an actor: its class, and sometimes the method that it runs."""
RAY_PROGRAMS: Final = {
    "gcs_server": "gcs_server",
    "raylet/raylet": "raylet",
    "log_monitor.py": "log monitor",
    "autoscaler/_private/monitor.py": "autoscaler monitor",
    "autoscaler/v2/monitor.py": "autoscaler monitor",
    "dashboard/dashboard.py": "dashboard",
    "dashboard/agent.py": "DashboardAgent",
    "runtime_env/agent/main.py": "RuntimeEnvAgent",
}
"""Ray's own programs by a part of their command."""
RAY_CLASSES: Final = frozenset({"DashboardAgent", "RuntimeEnvAgent", "IDLE", "IDLE_SpillWorker", "IDLE_RestoreWorker"})
"""Titles of processes of Ray that have the form of an actor's."""
SERVE_REPLICA: Final = "ServeReplica"
OF_THE_CLUSTER: Final = frozenset({"Runs", "NodeAgent", "ServeController", "ProxyActor", SERVE_REPLICA})
"""Classes of the actors that outlive runs."""
MOST_GROWTH_MIB: Final = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """A process of a host. `created_s` tells it from an earlier one with its id."""

    host: int
    name: str
    process_id: int
    created_s: float


def name_of(command: Sequence[str]) -> str | None:
    """Return the class of an actor's process or the name of a program of Ray; None for any other process."""
    line = " ".join(command)
    if (actor := ACTOR.match(line)) is not None:
        return actor.group(1)
    return next((name for part, name in RAY_PROGRAMS.items() if part in line.split(" --", maxsplit=1)[0]), None)


def is_of_ray(name: str) -> bool:
    """Return whether a process with this name is a part of Ray itself."""
    return name in RAY_CLASSES or name in RAY_PROGRAMS.values()


def processes_of(hosts: Mapping[int, Host]) -> list[HostProcess]:
    """Return the processes of actors and of Ray on all hosts, in a fixed order of host and name."""
    return sorted(_found(hosts), key=lambda found: (found.host, found.name, found.created_s))


def _found(hosts: Mapping[int, Host]) -> Iterator[HostProcess]:
    for number, host in hosts.items():
        for process_id in host.processes():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(process_id)
                if (name := name_of(process.cmdline())) is not None:
                    created_s = process.create_time()
                    yield HostProcess(host=number, name=name, process_id=process_id, created_s=created_s)


def actors(found: Iterable[HostProcess]) -> list[HostProcess]:
    """Return the processes of actors, without those of Ray and Serve."""
    return [one for one in found if not is_of_ray(one.name) and one.name.removeprefix("Serve") == one.name]


def cpu_s(found: Iterable[HostProcess]) -> dict[HostProcess, float]:
    """Return the user and system time of the processes that still run, without that of their children."""
    return _measured(found, lambda process: process.cpu_times().user + process.cpu_times().system)


def resident_mib(found: Iterable[HostProcess]) -> dict[HostProcess, float]:
    """Return the resident memory of the processes that still run."""
    return _measured(found, lambda process: process.memory_info().rss / 2**20)


def _measured(found: Iterable[HostProcess], measure: Callable[[psutil.Process], float]) -> dict[HostProcess, float]:
    measured = {}
    for one in found:
        with suppress(psutil.NoSuchProcess):
            measured[one] = measure(psutil.Process(one.process_id))
    return measured


def increase(before: Mapping[HostProcess, float], after: Mapping[HostProcess, float]) -> dict[HostProcess, float]:
    """Return the increase of a measurement for each process that was measured both times."""
    return {one: value - before[one] for one, value in after.items() if one in before}


def grown(growth_mib: Mapping[HostProcess, float]) -> list[str]:
    """Return a line for each process whose memory grew too much."""
    return [
        f"{one.name} {one.process_id} on host {one.host} grew by {mib:.1f} MiB, above {MOST_GROWTH_MIB:g}"
        for one, mib in growth_mib.items()
        if mib > MOST_GROWTH_MIB
    ]
