"""Injection of faults into a cluster, and its repair.

Invariants:
- Only processes inside the cluster's hosts and its Redis are touched.
- `undo` ends a fault that lasts; `mend` boots every host whose Ray has ended, as an operator of pods would, but for
  hosts that are down or cut off on purpose.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import psutil

from benches.cluster.faults import Fault, FaultKind
from benches.cluster.processes import SERVE_REPLICA, HostProcess, actors, processes_of
from support.cluster_rig import CONTROL, WORKERS, Cluster, ClusterRun, wait_until
from support.hosts import Host
from support.ray_hosts import HEAD

CLIENT_LOG: Final = "client.log"
ENDS_S: Final = 30.0
"""Time for Ray to end on a host that was declared dead."""


class Injector:
    """Injector of faults into one cluster with a run. `say` is given a line for each host that is booted again."""

    def __init__(self, cluster: Cluster, run: ClusterRun, say: Callable[[str], object]) -> None:
        self._cluster, self._run, self._say = cluster, run, say
        self._away: set[int] = set()
        self._undo: Callable[[], object] | None = None

    def inject(self, fault: Fault) -> str:
        """Cause a fault, and return what it hit."""
        match fault.kind:
            case FaultKind.WORKER_HOST:
                return self._kill_host(fault.choose(WORKERS))
            case FaultKind.CONTROL_HOST:
                return self._kill_host(CONTROL)
            case FaultKind.HEAD_HOST:
                return self._kill_host(HEAD)
            case FaultKind.GCS:
                return self._kill_process([one for one in self._processes() if one.name == "gcs_server"], fault)
            case FaultKind.REDIS_KILLED:
                self._cluster.ray.signal_redis(signal.SIGKILL)
                self._undo = self._restart_redis
                return "redis"
            case FaultKind.REDIS_STOPPED:
                self._cluster.ray.signal_redis(signal.SIGSTOP)
                self._undo = lambda: self._cluster.ray.signal_redis(signal.SIGCONT)
                return "redis"
            case FaultKind.SHORT_CUT | FaultKind.LONG_CUT:
                return self._cut(fault.choose((HEAD, CONTROL, *WORKERS)))
            case FaultKind.ACTOR:
                return self._kill_actor(fault)
            case FaultKind.CLIENT:
                return self._kill_client()
            case FaultKind.REPLICA:
                return self._kill_process([one for one in self._processes() if one.name == SERVE_REPLICA], fault)

    def undo(self) -> None:
        """End the fault, if it lasts."""
        self._away.clear()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def mend(self) -> None:
        """Boot the hosts on which Ray has ended, the head first."""
        for number, host in sorted(self._cluster.hosts.items()):
            if number in self._away or not self._cluster.ray.has_ended(host):
                continue
            if number != HEAD and not self._cluster.ray.head_answers():
                # A node cannot start without the head, whose end may not have been noticed yet.
                return
            self._say(f"booting host {number}")
            try:
                if number == HEAD:
                    self._cluster.boot_head()
                else:
                    self._cluster.boot(number)
            except RuntimeError as error:
                # Such as a head that was started while Redis was reading its file; the next call tries again.
                self._say(f"host {number} did not come up: {error}")
                return

    @property
    def is_whole(self) -> bool:
        """True if Ray runs on all hosts."""
        return not any(self._cluster.ray.has_ended(host) for host in self._cluster.hosts.values())

    def _processes(self) -> list[HostProcess]:
        return processes_of(self._cluster.hosts)

    def _restart_redis(self) -> None:
        self._cluster.ray.start_redis()
        # A GCS never connects to Redis again: it ends some seconds after it has lost it, and the head with it.
        head = self._cluster.hosts[HEAD]
        wait_until(lambda: self._cluster.ray.has_ended(head), "the head to notice the loss of Redis")

    def _kill_host(self, number: int) -> str:
        lost = sorted({one.name for one in actors(self._processes()) if one.host == number})
        self._away.add(number)
        self._cluster.hosts[number].kill()
        return f"host {number} ({', '.join(lost) or 'no actors'})"

    def _cut(self, number: int) -> str:
        host = self._cluster.hosts[number]
        lost = sorted({one.name for one in actors(self._processes()) if one.host == number})
        self._away.add(number)
        host.cut()
        self._undo = partial(self._join, host)
        return f"host {number} ({', '.join(lost) or 'no actors'})"

    def _join(self, host: Host) -> None:
        """Join a host again. Ray has declared it dead by now, and ends there when it hears of it."""
        host.join()
        with suppress(TimeoutError):
            wait_until(lambda: self._cluster.ray.has_ended(host), "Ray to end on a host that was cut off", ENDS_S)

    def _kill_actor(self, fault: Fault) -> str:
        found = actors(self._processes())
        name = fault.choose(sorted({one.name for one in found}))
        return self._kill_process([one for one in found if one.name == name], fault)

    def _kill_process(self, candidates: list[HostProcess], fault: Fault) -> str:
        if not candidates:
            return "nothing: there was no such process"
        victim = fault.choose(candidates)
        psutil.Process(victim.process_id).kill()
        return f"{victim.name} on host {victim.host}"

    def _kill_client(self) -> str:
        log = self._cluster.storage.parent / CLIENT_LOG
        log.write_bytes(b"")
        host = WORKERS[0]
        words = (
            "status",
            self._run.run_id,
            "--events",
            "--address",
            self._cluster.ray.address,
            "--owner",
            self._run.owner,
        )
        client: subprocess.Popen[bytes] | None = None

        def follows() -> bool:
            nonlocal client
            if client is None or _has_ended(client):
                # The host may have ended with an earlier fault, unnoticed.
                self.mend()
                client = self._cluster.start(*words, log=log, host=host)
            return b'"number"' in log.read_bytes() and not _has_ended(client)

        wait_until(follows, "events of the run")
        assert client is not None
        self._cluster.hosts[host].kill_program(client)
        return f"headrace status --events on host {host}"


def _has_ended(client: subprocess.Popen[bytes]) -> bool:
    return client.poll() is not None
