"""Control groups of sandboxes in a container of a version 2 host: a cgroup namespace with processes in its root.

This needs real root and a host with version 2 only; it is skipped elsewhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.sandboxes.linux.cgroup_placement import LEAF

pytestmark = pytest.mark.namespaces

ROOT = Path("/sys/fs/cgroup")

IN_CONTAINER = """
import asyncio, json
from pathlib import Path
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.doctor import probe
from headrace.sandboxes.local.provider import LocalProvider

async def main():
    rows = {row.name: row.present for row in probe() if row.name.startswith("cgroup")}
    async with LocalProvider() as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec(memory_bytes=64 << 20, cpu=0.5)))
        hog = await sandbox.exec("python3 -c 'bytearray(1 << 30)'", timeout_s=60)
        await sandbox.pause()
        await sandbox.resume()
        usage = await sandbox.usage()
    own = Path("/proc/self/cgroup").read_text().strip()
    print(json.dumps({"rows": rows, "exit": hog.exit_code, "oom_kills": usage.oom_kills, "own": own}))

asyncio.run(main())
"""


@pytest.fixture
def container() -> Iterator[Path]:
    if os.geteuid() != 0 or not (ROOT / "cgroup.controllers").exists():
        pytest.skip("needs root and control groups of version 2 alone")
    group = ROOT / f"headrace-test-{os.getpid()}"
    group.mkdir()
    (ROOT / "cgroup.subtree_control").write_text("+cpu +memory +pids")
    yield group
    for folder in (*group.iterdir(), group):
        if folder.is_dir():
            folder.rmdir()


def test_every_limit_is_set_in_a_container_with_processes_in_its_root_group(container: Path) -> None:
    mounted = "umount /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup"
    inside = f'{mounted} && exec "$0" -c "$1"'
    script = f'echo $$ > {container}/cgroup.procs; exec unshare --cgroup --mount bash -c \'{inside}\' "$0" "$1"'
    done = subprocess.run(["bash", "-c", script, sys.executable, IN_CONTAINER], capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["rows"].values()) == {True}
    assert (found["exit"], found["oom_kills"]) == (137, 1)
    assert found["own"] == f"0::/{LEAF}"
