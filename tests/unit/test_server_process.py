"""The end of a server process and of what it started, with a shell in the place of an engine."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from headrace.policies.processes.server_process import ServerCommand, ServerConfig, ServerProcess

if TYPE_CHECKING:
    from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
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
async def test_what_a_dead_leader_left_is_ended_too(tmp_path: Path, end: str) -> None:
    server = Shell(tmp_path, stop_timeout_s=0.2)
    await server.start()
    os.kill(server.pid, signal.SIGKILL)
    assert await server.wait() == -signal.SIGKILL
    assert server.child_runs()
    await getattr(server, end)()
    assert not server.child_runs()
    await server.stop()


async def test_what_outlives_a_leader_that_stops_is_killed(tmp_path: Path) -> None:
    async with Shell(tmp_path, stop_timeout_s=0.2) as server:
        assert server.child_runs()
    assert await server.wait() == -signal.SIGTERM
    assert not server.child_runs()


async def test_what_nobody_reaps_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a container whose first process reaps nobody: this process is the one that orphans come to."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        async with Shell(tmp_path, stop_timeout_s=30.0) as server:
            child = int(server.child_file.read_text())
            os.killpg(server.pid, signal.SIGKILL)
        assert psutil.Process(child).status() == psutil.STATUS_ZOMBIE
        reaped = os.waitpid(child, os.WNOHANG)  # noqa: ASYNC222 - it does not block
        assert reaped == (child, signal.SIGKILL)
    finally:
        assert libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0
    # asyncio warns of its own when it comes to the shell's end late.
    assert not [record for record in caplog.records if record.name.startswith("headrace")]
