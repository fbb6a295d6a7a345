"""The Redis of the Kubernetes manifests starts as they say, and their probe tells whether it answers."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from support.manifests import FOLDER, pods
from support.ray_hosts import redis_folder


def test_redis_reads_its_password_from_a_file_and_its_probe_sees_that_it_hangs(tmp_path: Path) -> None:
    if (programs := redis_folder()) is None:
        pytest.skip("scripts/install redis could not install Redis here")
    for folder in ("data", "run/redis", "etc/redis/secret"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "etc/redis/secret/password").write_text("of-the-secret")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    config = (FOLDER / "redis.conf").read_text().replace("6379", port).replace("/data", f"{tmp_path}/data")
    (tmp_path / "etc/redis/redis.conf").write_text(config.replace("bind *", "bind 127.0.0.1"))
    redis = pods()["headrace-redis"].container
    [script] = redis["args"]
    [*_, probe] = redis["livenessProbe"]["exec"]["command"]
    script, probe = (re.sub(r"/(etc|run)/redis", rf"{tmp_path}/\1/redis", text) for text in (script, probe))
    probe = probe.replace("redis-cli", f"redis-cli -p {port}").replace("timeout 4", "timeout 1")
    path = {"PATH": os.pathsep.join((str(programs), os.environ["PATH"]))}
    with subprocess.Popen(["sh", "-ec", script], env=path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("Ready to accept connections" in line for line in process.stdout)
            assert "of-the-secret" not in Path(f"/proc/{process.pid}/cmdline").read_text()
            assert subprocess.run(["sh", "-ec", probe], env=path, check=False).returncode == 0
            other = probe.replace("secret/password", "redis.conf")
            assert subprocess.run(["sh", "-ec", other], env=path, capture_output=True, check=False).returncode != 0
            process.send_signal(signal.SIGSTOP)
            assert subprocess.run(["sh", "-ec", probe], env=path, check=False).returncode != 0
        finally:
            process.kill()
