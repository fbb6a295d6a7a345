"""`headrace serve gateway` as a program that may be killed, and that a supervisor starts again on its port."""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.buffer.primitives.durable_files import write_private
from support.gateway_rig import ADMIN

START_S = 60.0


@dataclass
class GatewayProgram:
    """One port and one folder of sessions; `up` is set while it listens there."""

    command: tuple[str, ...]
    url: str
    pid: int = 0
    up: asyncio.Event = field(default_factory=asyncio.Event)
    _process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert self._process is None
        self._process = await asyncio.create_subprocess_exec(*self.command, stdout=asyncio.subprocess.PIPE)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self._process.stdout.readline()
        assert json.loads(line) == {"url": self.url, "pid": self.pid}
        self.up.set()

    async def kill(self) -> None:
        """With -9; returns when it is gone."""
        self.up.clear()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            await process.wait()

    def memory_mb(self) -> float:
        """Resident."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


@asynccontextmanager
async def gateway_program(
    model_dir: Path, state: Path, engine_urls: Sequence[str], *options: str
) -> AsyncIterator[GatewayProgram]:
    """A running one; it ends with the block."""
    token = state.with_name(f"{state.name}-token")
    write_private(token, ADMIN.encode())
    port = quiet_port()
    program = GatewayProgram(
        command=(
            str(Path(sys.executable).with_name("headrace")), "serve", "gateway", "--engine", ",".join(engine_urls),
            "--tokenizer", str(model_dir), "--port", str(port), "--state", str(state),
            "--admin-token-file", str(token), "--json", "-", *options,
        ),
        url=f"http://127.0.0.1:{port}",
    )  # fmt: skip
    try:
        await program.start()
        yield program
    finally:
        await program.kill()


def quiet_port() -> int:
    """A free port that the kernel gives to nobody by itself, so that it is still free after a kill."""
    first, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    while True:
        port = random.randrange(10_000, first)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
