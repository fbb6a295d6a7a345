"""A Ray cluster over the hosts of `hosts.py`: a head whose state is in Redis, and nodes with labels.

Redis runs outside the hosts, like a service of its own, at `<prefix>.1`. All of it dies with this process: nothing ends
with `ray stop`, which ends processes by name.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from support.hosts import Host, Network

ROOT: Final = Path(__file__).resolve().parents[2]
HEAD: Final = 10
HEAD_PORT: Final = 6379
REDIS_PORT: Final = 16379
START_S: Final = 180.0
"""Hang guard of a start; a head takes 12 to 47 s, depending on what else runs."""
STORE_BYTES: Final = 100_000_000
HEALTH_CHECKS: Final = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_health_check_initial_delay_ms": "2000",
}
"""Of the head: it declares a lost node dead after 12 s, and not after 30 s."""
_STARTED: Final = "Ray runtime started"


def redis_folder() -> Path | None:
    """Return the folder with redis-server, or None where it cannot be installed."""
    done = subprocess.run([ROOT / "scripts" / "install", "redis"], capture_output=True, text=True, check=False)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


class RayHosts:
    """A head and nodes of one Ray cluster. The head is host 10; tests choose the numbers of the nodes."""

    def __init__(self, network: Network, redis: Path) -> None:
        self._network = network
        self._redis_program = redis / "redis-server"
        self._folder = network.shared
        self._password = secrets.token_hex(16)
        token = self._folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        # The environment's own bin first: `ray` and what it starts.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        python_path = os.pathsep.join((str(ROOT / "scripts"), str(ROOT / "tests")))
        self.environment = {
            "PATH": path,
            "PYTHONPATH": python_path,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ENABLE_AUTO_CONNECT": "0",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
            # A busy machine needs more than Ray's 30 s.
            "RAY_raylet_start_wait_time_s": "120",
        }
        self._redis: subprocess.Popen[bytes] | None = None
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        shutil.rmtree(self._folder / "redis", ignore_errors=True)
        self.start_redis()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._network.close()
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()

    @property
    def address(self) -> str:
        """The head's address, for `ray.init` and RAY_ADDRESS."""
        return f"{self._network.prefix}.{HEAD}:{HEAD_PORT}"

    def head(self) -> Host:
        """Boot the head, or boot it again with an empty disk: its state comes from Redis."""
        host = self._network.boot(HEAD)
        redis = {
            "RAY_REDIS_ADDRESS": f"{self._network.prefix}.1:{REDIS_PORT}",
            "RAY_external_storage_namespace": "headrace",
            **HEALTH_CHECKS,
        }
        options = (
            *("--head", "--port", str(HEAD_PORT), "--redis-password", self._password, "--include-dashboard", "false"),
            *("--num-cpus", "0", "--labels", "headrace/role=head"),
        )
        self._start(host, options, redis)
        return host

    def node(self, number: int, *, role: str, cpus: int = 2, disk: Path | None = None) -> Host:
        """Boot a node. Nodes start one after another, since Ray gives a start 30 s."""
        host = self._network.boot(number, disk=disk)
        self._start(host, ("--address", self.address, "--num-cpus", str(cpus), "--labels", f"headrace/role={role}"), {})
        return host

    def run(self, host: Host, *words: str, timeout_s: float = START_S) -> str:
        """Run this environment's Python in a host, as a driver of the cluster, and return its output."""
        return host.run(sys.executable, *words, timeout_s=timeout_s, RAY_ADDRESS=self.address, **self.environment)

    def has_ended(self, host: Host) -> bool:
        """Return whether Ray has ended on a host, which must then be booted again."""
        return self._started[host.name].poll() is not None

    def head_answers(self) -> bool:
        """Return whether the head accepts connections, without which no node can start."""
        try:
            with socket.create_connection((f"{self._network.prefix}.{HEAD}", HEAD_PORT), timeout=1):
                return True
        except OSError:
            return False

    def signal_redis(self, number: signal.Signals) -> None:
        """Send a signal to Redis, such as SIGSTOP and SIGCONT, or SIGKILL."""
        assert self._redis is not None
        self._redis.send_signal(number)
        if number is signal.SIGKILL:
            self._redis.wait()

    def _start(self, host: Host, options: tuple[str, ...], environment: dict[str, str]) -> None:
        log = self._folder / f"{host.name}-ray.log"
        log.write_bytes(b"")
        common = (
            *("--block", "--node-ip-address", host.address, "--object-store-memory", str(STORE_BYTES)),
            "--disable-usage-stats",
        )
        process = host.start("ray", "start", *options, *common, log=log, **self.environment, **environment)
        self._started[host.name] = process
        end_s = time.monotonic() + START_S
        while _STARTED not in (text := log.read_text(encoding="utf-8", errors="replace")):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"ray did not start on {host.name}: {_without_password(text, self._password)}")
            time.sleep(0.05)

    def start_redis(self) -> None:
        """Start Redis, or start it again with what it has written."""
        data = self._folder / "redis"
        data.mkdir(mode=0o700, exist_ok=True)
        config = data / "redis.conf"
        lines = (
            f"bind {self._network.prefix}.1",
            f"port {REDIS_PORT}",
            f"requirepass {self._password}",
            f"dir {data}",
            *("appendonly yes", 'save ""', "maxmemory-policy noeviction", "daemonize no"),
        )
        config.write_text("\n".join(lines) + "\n", encoding="utf-8")
        with (data / "redis.log").open("wb") as log:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", self._redis_program, config], stdout=log, stderr=log
            )
        end_s = time.monotonic() + START_S
        while "Ready to accept connections" not in (data / "redis.log").read_text(encoding="utf-8", errors="replace"):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"Redis did not start, see {data / 'redis.log'}")
            time.sleep(0.02)
        self._redis = process


def _without_password(text: str, password: str) -> str:
    return re.sub(re.escape(password), "...", text)[-2000:]
