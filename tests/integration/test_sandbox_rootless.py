"""Sandboxes without root: one user id, no control groups, everything else unchanged.

The test runs as root and starts a process of another user. That process has already imported the modules, and the
launcher it starts is the system's Python with a copy of the package that every user can read.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.sandboxes import doctor

pytestmark = pytest.mark.namespaces

USER = 54321
SYSTEM_PYTHON = "/usr/bin/python3"

SCRIPT = """
import asyncio, json, os, sys, types
from pathlib import Path
import headrace.sandboxes.local.provider, headrace.sandboxes.doctor, headrace.sandboxes.pool.pool
from headrace.sandboxes import doctor
from headrace.sandboxes.linux import stdlib_process
from headrace.sandboxes.local import launcher_process
from headrace.sandboxes.base import FrozenMount, HostFolder, SandboxSpec
from headrace.sandboxes.errors import ExecTimeout, SandboxGone, SpecRefused, Unsupported
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
import asyncio.selector_events, aiohttp, concurrent.futures.thread, headrace.sandboxes.images.store

folder, user, python = sys.argv[1], int(sys.argv[2]), sys.argv[3]
os.setgroups([])
os.setresgid(user, user, user)
os.setresuid(user, user, user)
stdlib_process.sys = types.SimpleNamespace(executable=python)
stdlib_process.__file__ = folder + "/package/linux/stdlib_process.py"
os.environ.clear()
os.environ["HOME"] = folder
found = {}

async def out(sandbox, command, **options):
    result = await sandbox.exec(command, timeout_s=30, **options)
    return result.stdout.decode().strip() + result.stderr.decode().strip()

async def main():
    found["guarantees"] = {row.name: row.present for row in doctor.probe()}
    doctor.require_namespaces()
    async with LocalProvider(LocalSandboxConfig(runtime_folder=Path(folder) / "run")) as provider:
        sandbox = await provider.attach(await provider.create(SandboxSpec()))
        found["id"] = await out(sandbox, "id -u; cat /proc/self/uid_map | tr -s ' '")
        found["agent"] = await out(sandbox, "echo $HOME $USER", user="agent")
        found["root"] = await out(sandbox, "ls /; ls -A /root /tmp /home/agent; touch /usr/x; hostname")
        found["network"] = await out(sandbox, "exec 3<>/dev/tcp/8.8.8.8/53")
        found["processes"] = await out(sandbox, "echo /proc/[0-9]*")
        await sandbox.write("/workspace/deep/file", b"text", user="agent")
        found["file"] = (await sandbox.read("/workspace/deep/file", max_bytes=10)).decode()
        try:
            await sandbox.exec("sleep 1000 & sleep 1000", timeout_s=0.3)
        except ExecTimeout:
            found["timeout"] = await out(sandbox, "pgrep sleep; echo none")
        process = await sandbox.spawn("cat", stdin=True)
        await process.write_stdin(b"spoken")
        await process.close_stdin()
        found["spawn"] = b"".join([piece.data async for piece in process.output()]).decode()
        await sandbox.freeze()
        mount = FrozenMount(source=sandbox.id, path="/workspace", target="/mnt/w")
        clean = await provider.attach(await provider.create(SandboxSpec(mounts=(mount,))))
        found["mounted"] = await out(clean, "cat /mnt/w/deep/file; touch /mnt/w/x")
        await out(clean, "mkdir -p /opt/a; echo kept > /opt/a/f")
        image = await clean.snapshot()
        clone = await provider.attach(await provider.create(SandboxSpec(image=image)))
        found["clone"] = await out(clone, "cat /opt/a/f; echo new > /opt/a/f; rm -r /opt/a; ls /opt")
        shown = HostFolder(source=folder + "/package", target="/opt/shown")
        try:
            await provider.create(SandboxSpec(folders=(shown,)))
        except Unsupported as error:
            found["folder"] = str(error)
        try:
            await provider.create(SandboxSpec(memory_bytes=1 << 28))
        except SpecRefused as error:
            found["memory"] = str(error)
        launcher = provider.launcher_pid
        many = await asyncio.gather(*(provider.create(SandboxSpec()) for _ in range(10)))
        found["many"] = len({ref.id for ref in many})
    found["launcher"] = Path(f"/proc/{launcher}").exists()

asyncio.run(main())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Iterator[dict[str, Any]]:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"no {SYSTEM_PYTHON}")
    # Not below tmp_path or TMPDIR, whose parents other users need not be able to search.
    with tempfile.TemporaryDirectory(prefix="headrace-rootless-", dir="/var/tmp") as folder:
        package = Path(doctor.__file__).parent
        shutil.copytree(package, Path(folder) / "package", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (Path(folder), *Path(folder).rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.chown(folder, USER, USER)
        command = (sys.executable, "-c", SCRIPT, folder, str(USER), SYSTEM_PYTHON)
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        result = json.loads(done.stdout)
        if not result["guarantees"]["user namespace"]:
            pytest.skip("user namespaces are for root only here")
        yield result


def test_probe_reports_missing_guarantees_without_root(found: dict[str, Any]) -> None:
    missing = {name for name, present in found["guarantees"].items() if not present}
    assert {"id range", "cgroup memory"} <= missing
    assert {"mount namespace", "network namespace", "call filter", "private root"} & missing == set()


def test_a_rootless_sandbox_has_one_user_id(found: dict[str, Any]) -> None:
    assert found["id"] == "0\n 0 0 1"
    assert found["agent"] == "/home/agent agent"


def test_the_host_is_not_visible(found: dict[str, Any]) -> None:
    assert "workspace" in found["root"].split()
    assert "Read-only file system" in found["root"]
    assert "\nsandbox" in found["root"]
    assert "Network is unreachable" in found["network"]
    assert len(found["processes"].split()) <= 3


def test_commands_files_and_timeouts_work_without_root(found: dict[str, Any]) -> None:
    assert (found["file"], found["spawn"], found["timeout"]) == ("text", "spoken", "none")


def test_frozen_data_and_clones_work_without_root(found: dict[str, Any]) -> None:
    assert found["mounted"].startswith("text")
    assert "Read-only file system" in found["mounted"]
    assert found["clone"] == "kept"


def test_unenforceable_limits_are_refused(found: dict[str, Any]) -> None:
    assert "memory limit" in found["memory"]


def test_many_rootless_sandboxes_leave_nothing_behind(found: dict[str, Any]) -> None:
    assert found["many"] == 10
    assert found["launcher"] is False


def test_host_folders_are_refused_without_root(found: dict[str, Any]) -> None:
    assert "only root can mount host folders" in found["folder"]
