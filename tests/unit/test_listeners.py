"""Stores of process groups listen on the address that their members are given, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace.policies.errors import GroupFailed
from headrace.policies.push.process_group import host_store, join_store


def listening(pid: int | None = None) -> set[str]:
    """Addresses on which a process listens."""
    connections = psutil.Process(pid or os.getpid()).net_connections("inet")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_the_senders_store_listens_only_on_its_own_address() -> None:
    before = listening()
    store = host_store("127.0.0.1", 2, 30.0)
    assert listening() - before == {"127.0.0.1"} - before
    other = join_store("127.0.0.1", store.port, 1, 30.0)
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_an_address_on_another_machine_is_named_in_the_error() -> None:
    with pytest.raises(GroupFailed, match=r"no store could be opened at 203\.0\.113\.1"):
        host_store("203.0.113.1", 2, 10.0)


@pytest.mark.whole
def test_the_learners_process_group_listens_only_on_loopback(tmp_path: Path) -> None:
    code = """
import psutil
from headrace.policies.learners import megatron_world
megatron_world.start(0)
print(*{row.laddr.ip for row in psutil.Process().net_connections("inet") if row.status == psutil.CONN_LISTEN})
megatron_world.stop()
"""
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=110, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["127.0.0.1"]
