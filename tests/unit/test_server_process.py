"""The end of a server process and of what it started, with a shell in the place of an engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headrace.policies.processes.server_process import ServerCommand, ServerConfig, ServerProcess

PROGRAM = "sleep 600 & echo $! > child.partial; mv child.partial child; exec sleep 600"


class Shell(ServerProcess):
    """It answers as soon as it has a child."""

    def __init__(self, folder: Path, *, stop_timeout_s: float) -> None:
        given = ServerConfig(model=folder, directory=folder, start_timeout_s=30.0, stop_timeout_s=stop_timeout_s)
        super().__init__(given)
        self.child_file = folder / "child"

    async def _prepare(self) -> ServerCommand:
        script = f"cd {self.child_file.parent}; {PROGRAM}"
        return ServerCommand(arguments=("/bin/bash", "-c", script), environment=os.environ)

    async def _ready_url(self) -> str | None:
        return "http://nowhere" if self.child_file.exists() else None

    def child_runs(self) -> bool:
        try:
            return psutil.Process(int(self.child_file.read_text())).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_children_of_a_dead_leader_are_terminated(tmp_path: Path, end: str) -> None:
    server = Shell(tmp_path, stop_timeout_s=0.2)
    await server.start()
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    assert server.child_runs()
    await getattr(server, end)()
    assert not server.child_runs()
    await server.stop()


async def test_children_that_outlive_a_stopped_leader_are_killed(tmp_path: Path) -> None:
    async with Shell(tmp_path, stop_timeout_s=0.2) as server:
        assert server.child_runs()
    assert await server.wait() == -signal.SIGTERM
    assert not server.child_runs()


ALONE = """
import asyncio, ctypes, logging, os, runpy, signal, sys
from pathlib import Path
import psutil
logging.basicConfig(format="%(name)s: %(message)s")
assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0, "PR_SET_CHILD_SUBREAPER"
async def main():
    Shell = runpy.run_path(sys.argv[1])["Shell"]
    async with Shell(Path(sys.argv[2]), stop_timeout_s=30.0) as server:
        child = int(server.child_file.read_text())
        os.killpg(server.pid, signal.SIGKILL)
    print(psutil.Process(child).status(), os.waitpid(child, os.WNOHANG) == (child, signal.SIGKILL))
asyncio.run(main())
"""


def test_stopping_does_not_wait_for_zombies(tmp_path: Path) -> None:
    """As in a container whose first process reaps nobody: a process of its own is the one that orphans come to."""
    command = [sys.executable, "-c", ALONE, __file__, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert told.stdout == f"{psutil.STATUS_ZOMBIE} True\n", told.stderr
    # asyncio warns of its own when it comes to the shell's end late.
    assert "headrace" not in told.stderr
